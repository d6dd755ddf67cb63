"""The progress of long commands: a bar in a terminal, a line every 30 seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tlt.contracts import ShowProgress

LOG_EVERY_S = 30.0


@contextmanager
def progress_bar(console: Console) -> Iterator[ShowProgress]:
    """Show the progress of a command while the context lasts."""
    if not console.is_terminal:
        yield _logged(console)
        return
    with Progress(
        TextColumn("{task.description:40}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("starting", total=1)
        yield lambda what, done, total: progress.update(
            bar, description=what, completed=done, total=total
        )


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
