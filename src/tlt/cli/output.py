"""What commands print: lines and tables for people, or one JSON result for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tlt.cli.progress import progress_bar

if TYPE_CHECKING:
    from tlt.contracts import ShowProgress
    from tlt.observe.health import Finding


class Output:
    """The output of one command.

    With `--json`, `result` alone prints to stdout. Lines, tables and "wrote" are then left out, and
    progress and notes go to stderr. Text is never markup: it may name files.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json)

    def note(self, text: str, style: str = "", end: str = "\n") -> None:
        """Print text, with `--json` to stderr."""
        self.console.print(
            text, style=style, end=end, markup=False, highlight=False, soft_wrap=True
        )

    def say(self, text: str, style: str = "") -> None:
        """Print a line for people."""
        if not self.as_json:
            self.note(text, style)

    def marked(self, mark: str, style: str, text: str) -> None:
        """Print a line that begins with a coloured word, with `--json` to stderr."""
        self.note(mark, style, end=" ")
        self.note(text)

    def wrote(self, what: str) -> None:
        """Say which files the command wrote."""
        if not self.as_json:
            self.marked("wrote", "green", what)

    def findings(self, found: Iterable[Finding]) -> None:
        """Print what limits a run's speed, and which settings to change."""
        for finding in () if self.as_json else found:
            self.note(finding.says)
            self.marked("->", "green", finding.change)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table. A heading after `>` marks numbers: right-aligned, never wrapped.

        The cells of a heading after `|` are not wrapped either.
        """
        if self.as_json:
            return
        table = Table(
            title=escape(title),
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        cells = [[escape(cell) for cell in row] for row in rows]
        for place, column in enumerate(columns):
            heading = column.lstrip(">|")
            longest = max((len(row[place]) for row in cells), default=0)
            table.add_column(
                heading,
                justify="right" if column.startswith(">") else "left",
                min_width=None if heading == column else longest,
            )
        for row in cells:
            table.add_row(*row)
        self.console.print(table)

    def result(self, data: Any) -> None:
        """Print the result if JSON is asked for."""
        if self.as_json:
            typer.echo(json.dumps(_finite(data), indent=1, default=str))

    def progress(self, log_file: Path | None = None) -> AbstractContextManager[ShowProgress]:
        """Show the progress of the command while the context lasts."""
        return progress_bar(self.console, log_file)


def _finite(data: Any) -> Any:
    """Return the data with null for numbers that are not finite, which JSON has no word for."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def command_line() -> str:
    """Return the command line as the user typed it."""
    return "tlt " + " ".join(sys.argv[1:])


def write_json(path: Path, data: Any) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(data, indent=1) + "\n")
