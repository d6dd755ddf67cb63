"""`tlt report`: one or several runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tlt.cli.options import print_findings, result_table, say_written


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; the others are compared with the first.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Page to write; by default report.html in the last run."),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder to also write every chart to, as SVG files.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON, and write no page.")
    ] = False,
) -> None:
    """Show where the time of runs went, what holds them back, and how they compare."""
    from tlt.report.gain import compare, in_words
    from tlt.report.page import as_html, as_json
    from tlt.report.page import pictures as files
    from tlt.report.view import look_at

    views = [look_at(run) for run in runs]
    if len({view.name for view in views}) < len(views):
        for run, view in zip(runs, views, strict=True):
            view.name = str(run)
    if json:
        typer.echo(as_json(views))
        return
    console = Console()
    for view in views:
        console.print(
            f"[bold]{escape(view.name)}[/]: {len(view.records)} RL steps", highlight=False
        )
        print_findings(console, view)
    if len(views) > 1:
        table = result_table(f"speed-up over {views[0].name}")
        table.add_column("run")
        for heading in ("in all", "RL step", "rollout", "rollout per token"):
            table.add_column(heading, justify="right", no_wrap=True)
        for other in views[1:]:
            table.add_row(escape(other.name), *in_words(compare(views[0], other)))
        console.print(table)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, svg in files(views).items():
            (pictures / name).write_text(svg)
    page = out or runs[-1] / "report.html"
    page.write_text(as_html(views, page))
    say_written(console, str(page))
