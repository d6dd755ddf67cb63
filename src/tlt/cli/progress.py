"""The progress of long commands: a bar in a terminal, a line every 30 seconds in a file.

Warnings and errors of `tlt` appear above the bar.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tlt.contracts import ShowProgress

T = TypeVar("T")

LOG_EVERY_S = 30.0


@contextmanager
def progress_bar(console: Console, log_file: Path | None = None) -> Iterator[ShowProgress]:
    """Show the progress of a command while the context lasts; `log_file` has its tracebacks."""
    warnings = _Warnings(console if console.is_terminal else Console(stderr=True), log_file)
    logger = logging.getLogger("tlt")
    logger.addHandler(warnings)
    try:
        with Progress(
            TextColumn("{task.description:40}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        ) as progress:
            bar = progress.add_task("starting", total=1)

            def show(what: str, done: float, total: float) -> None:
                progress.update(bar, description=what, completed=done, total=total)

            yield show if console.is_terminal else _logged(console)
    finally:
        logger.removeHandler(warnings)


def awaited(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield items as they come; show on stderr that more are awaited, if it is a terminal.

    The line disappears with each item, so only the command's output remains.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield from items
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(what, total=None)
    coming = iter(items)
    while True:
        with progress:
            try:
                item = next(coming)
            except StopIteration:
                return
        yield item


class _Warnings(logging.Handler):
    """Prints warnings and errors, each on one line."""

    def __init__(self, console: Console, log_file: Path | None) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._log_file = log_file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, _, more = record.getMessage().partition("\n")
            error = record.exc_info[1] if record.exc_info else None
            if self._log_file is None and error is not None:
                text += f" ({error!r})"
            elif self._log_file is not None and (error or more):
                text += f" (see {self._log_file})"
            level = record.levelname.lower()
            colour = "red" if record.levelno >= logging.ERROR else "yellow"
            self._console.print(
                f"[{colour}]{level}[/] {escape(text)}", highlight=False, soft_wrap=True
            )
        except Exception:
            self.handleError(record)


def _logged(console: Console) -> ShowProgress:
    started_at = time.monotonic()
    last_shown = -LOG_EVERY_S

    def show(what: str, done: float, total: float) -> None:
        nonlocal last_shown
        elapsed_s = time.monotonic() - started_at
        if elapsed_s - last_shown >= LOG_EVERY_S:
            last_shown = elapsed_s
            minutes, seconds = divmod(int(elapsed_s), 60)
            console.print(f"{minutes:3}:{seconds:02} {what}, {done / total:.0%}", highlight=False)

    return show
