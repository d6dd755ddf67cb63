"""`tlt data`: problems of well-known datasets, or of your own, as the file that a run reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tlt.cli.options import Json, number, option
from tlt.cli.output import Output

if TYPE_CHECKING:
    from tlt.tasks.datasets import Columns

app = typer.Typer(
    no_args_is_help=True, help="Write the problems of a dataset as the file that a run reads."
)

Split = Annotated[str, option("Split of the dataset, such as train or test.")]
Out = Annotated[Path | None, option("File to write, .jsonl; by default named after the dataset.")]
Limit = Annotated[int | None, number("Problems to write; by default all.", 1, 100_000_000)]


@app.command()
def gsm8k(
    split: Split = "train", out: Out = None, limit: Limit = None, as_json: Json = False
) -> None:
    """Write GSM8K: 7,473 grade-school word problems, and 1,319 test problems."""
    from tlt.tasks.datasets import GSM8K, Columns, from_hub

    target = out or Path(f"data/gsm8k-{split}.jsonl")
    rows = from_hub(GSM8K, ["main"], split)
    _write(rows, Columns("question", "answer", "hashes"), target, limit, as_json)


@app.command()
def math(
    split: Split = "train", out: Out = None, limit: Limit = None, as_json: Json = False
) -> None:
    """Write MATH: 7,500 competition problems, and 5,000 test problems."""
    from tlt.tasks.datasets import MATH, SUBJECTS, Columns, from_hub

    target = out or Path(f"data/math-{split}.jsonl")
    rows = from_hub(MATH, SUBJECTS, split)
    _write(rows, Columns("problem", "solution", "boxed"), target, limit, as_json)


@app.command()
def jsonl(
    source: Annotated[
        str,
        typer.Argument(help="Dataset of the Hub, such as owner/name, or .csv, .jsonl or .parquet."),
    ],
    question: Annotated[str, option("Column of the question.")] = "question",
    answer: Annotated[str, option("Column of the answer.")] = "answer",
    extract: Annotated[
        Literal["all", "boxed", "hashes"],
        option(
            r"Part of the column that is the answer: everything, the last \boxed{}, or the text "
            "after ####."
        ),
    ] = "all",
    split: Split = "train",
    config: Annotated[str | None, option("Config of a dataset of the Hub.")] = None,
    out: Out = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Write any dataset of the Hub, or a table of your own, as question and answer."""
    from tlt.errors import ConfigError
    from tlt.models.hub import hub_id
    from tlt.tasks.datasets import TABLES, Columns, from_file, from_hub

    columns = Columns(question, answer, extract)
    path = Path(source)
    rows: Iterable[Any]
    if path.suffix.lower() in TABLES or path.exists():
        if not path.is_file() or path.suffix.lower() not in TABLES:
            what = "is not a table" if path.exists() else "does not exist"
            raise ConfigError(f"{source} {what}; give a .csv, .jsonl or .parquet file")
        rows, name = from_file(path, columns), path.stem
    elif hub_id(source) is not None:
        rows, name = from_hub(source, [config], split), f"{path.name}-{split}"
    else:
        raise ConfigError(
            f"{source!r} is neither a file here nor a dataset of the Hub; e.g. openai/gsm8k, or "
            "problems.csv"
        )
    _write(rows, columns, out or Path(f"data/{name}.jsonl"), limit, as_json)


def _write(
    rows: Iterable[Any], columns: Columns, out: Path, limit: int | None, as_json: bool
) -> None:
    from tlt.tasks.datasets import write_problems

    output = Output(as_json)
    with output.console.status("reading the dataset"):
        written = write_problems(rows, columns, out, limit)
    count, left_out = written.num_problems, written.num_skipped
    output.result({"path": str(out), "problems": count, "left_out": left_out})
    without = f", {left_out} left out without an answer" if left_out else ""
    output.wrote(f"{out}: {count} problems{without}")
    output.say(f"next: tlt init --model MODEL --data {out}")
