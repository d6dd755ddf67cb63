"""Options and output that several commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from tlt.report.view import RunView
    from tlt.tasks.tail import HeavyTail

LARGEST_SEED = 2**63 - 1


def number(text: str, low: float, high: float | None = None) -> Any:
    """Return an option that takes numbers from `low` to `high`."""
    return typer.Option(min=low, max=high, callback=_is_number, help=text)


def _is_number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # within any range, as comparisons have it
        raise typer.BadParameter("nan is not a number.")
    return value


Temperature = Annotated[float, number("Sampling temperature.", 0, 2)]
TopP = Annotated[float, number("Probability mass of nucleus sampling.", 1e-6, 1)]
Lr = Annotated[float, number("Highest learning rate.", 1e-12, 1)]
RowTokens = Annotated[int, number("Tokens per optimizer step.", 16, 10_000_000)]
MaxTokens = Annotated[int, number("Longest response in tokens.", 1, 10_000_000)]
Engines = Annotated[int, number("Engines, each on its own core or GPU.", 1, 100_000)]
Gpus = Annotated[int, number("GPUs per engine; 0 makes CPU engines.", 0, 10_000)]
Seed = Annotated[int, number("Seed of problems, lengths, samples and training.", 0, LARGEST_SEED)]

Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", help="Parameter of the task, such as max_digits=1. Repeatable."),
]
Sizes = Annotated[
    str | None,
    typer.Option(help="Problem sizes as median,p95,longest; by default those of the task."),
]

Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the weights.")]
Compute = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Dtype of matrix products; auto is bfloat16 if the CPU has it."),
]

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")
]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Lowest level of the lines in the log files of run.out."),
]

Prompts = Annotated[
    Path | None,
    typer.Option(help="File of your own prompts: .jsonl with a 'prompt', or one per line."),
]


def read_prompts(file: Path, count: int, fewer: str) -> list[str]:
    """Return the first prompts of a file; `fewer` says which option asks for less of them."""
    from tlt.errors import ConfigError

    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise ConfigError(f"--prompts {file} does not exist; give a .jsonl or text file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--prompts {file} cannot be read ({error}); give a .jsonl or text file in UTF-8"
        ) from error
    if len(lines) < count:
        raise ConfigError(
            f"--prompts {file} has {len(lines)} prompts, but {count} are asked for; lower {fewer}"
        )
    texts = []
    for place, line in enumerate(lines[:count], 1):
        text: str | None = line
        if file.suffix == ".jsonl":
            try:
                text = json.loads(line)["prompt"]
            except (ValueError, LookupError, TypeError, RecursionError):
                text = None
        if not isinstance(text, str):
            raise ConfigError(
                f"{file}, line {place}: no 'prompt'; e.g. " + json.dumps({"prompt": "Is 7 prime?"})
            )
        texts.append(text)
    return texts


def read_sizes(text: str | None) -> HeavyTail | None:
    """Return the problem sizes that `--sizes` names; None for those of the task."""
    from tlt.errors import ConfigError
    from tlt.tasks.tail import HeavyTail

    if text is None:
        return None
    try:
        median, p95, longest = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--sizes {text!r} is not three numbers; e.g. 6,30,60") from None
    return HeavyTail(median, p95, longest)


OPTION_OF = {
    "task.name": "--task",
    "task.path": "--task",
    "task.parameters": "--parameter",
    "task.sizes": "--sizes",
    "reward.function": "--reward",
}
"""Settings of a run, by the option that stands for each in commands without a TOML file."""


@contextmanager
def named_by_options(options: Mapping[str, str] = OPTION_OF) -> Iterator[None]:
    """Let errors name the options of a command, not the settings of a run's TOML file."""
    from tlt.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        text = str(error)
        for setting, option in options.items():
            text = text.replace(setting, option)
        raise ConfigError(text) from error


def command_line() -> str:
    """Return the command line as the user typed it."""
    return "tlt " + " ".join(sys.argv[1:])


def print_findings(console: Console, view: RunView) -> None:
    """Print what limits a run's speed, and which settings to change."""
    from tlt.report.findings import findings

    for finding in findings(view):
        console.print(
            f"{escape(finding.says)}\n[green]->[/] {escape(finding.change)}",
            highlight=False,
            soft_wrap=True,
        )


def print_json(data: Any) -> None:
    """Print a result as JSON, which has no word for what is not finite."""
    typer.echo(json.dumps(_finite(data), indent=1, default=str))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def result_table(title: str) -> Table:
    return Table(
        title=escape(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def say_written(console: Console, what: str) -> None:
    """Say which files a command wrote; names of files are not markup."""
    console.print(f"[green]wrote[/] {escape(what)}", highlight=False, soft_wrap=True)
