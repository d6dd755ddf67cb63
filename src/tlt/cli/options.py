"""Options and output that several commands share."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tlt.report.view import RunView

Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the weights.")]
Compute = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Dtype of matrix products; auto is bfloat16 if the CPU has it."),
]

Prompts = Annotated[
    Path | None,
    typer.Option(help="File of your own prompts: .jsonl with a 'prompt', or one per line."),
]


def read_prompts(file: Path, count: int, fewer: str) -> list[str]:
    """Return the first prompts of a file; `fewer` says which option asks for less of them."""
    from tlt.errors import ConfigError

    if not file.exists():
        raise ConfigError(f"--prompts {file} does not exist; give a .jsonl or text file")
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if len(lines) < count:
        raise ConfigError(
            f"--prompts {file} has {len(lines)} prompts, but {count} are asked for; lower {fewer}"
        )
    texts = []
    for number, line in enumerate(lines[:count], 1):
        text: str | None = line
        if file.suffix == ".jsonl":
            try:
                text = json.loads(line)["prompt"]
            except (json.JSONDecodeError, KeyError, TypeError):
                text = None
        if not isinstance(text, str):
            raise ConfigError(
                f"{file}, line {number}: no 'prompt'; e.g. " + json.dumps({"prompt": "Is 7 prime?"})
            )
        texts.append(text)
    return texts


def require_plots() -> None:
    """Fail early if the plotting library is missing."""
    from tlt.errors import ConfigError

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib; run: pip install 'tlt-rl[plot]'")


def command_line() -> str:
    """Return the command line as the user typed it."""
    return "tlt " + " ".join(sys.argv[1:])


def print_findings(console: Console, view: RunView) -> None:
    """Print what limits a run's speed, and which settings to change."""
    from tlt.report.findings import findings

    for finding in findings(view):
        console.print(
            f"{finding.says}\n[green]->[/] {finding.change}", highlight=False, soft_wrap=True
        )


def result_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
