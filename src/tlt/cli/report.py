"""`tlt report`: one or several runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlt.cli.options import option
from tlt.cli.output import Output


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; the others are compared with the first.")
    ],
    out: Annotated[
        Path | None,
        option("Page to write; by default report.html in the last run."),
    ] = None,
    pictures: Annotated[
        Path | None, option("Folder to also write every chart to, as SVG files.")
    ] = None,
    json: Annotated[
        bool, option("Print the numbers as JSON, and write no page.", "--json")
    ] = False,
) -> None:
    """Show where the time of runs went, what holds them back, and how they compare."""
    from tlt.report.findings import findings
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
    output = Output()
    for view in views:
        output.marked(f"{view.name}:", "bold", f"{len(view.records)} RL steps")
        output.findings(findings(view))
    rows = [[other.name, *in_words(compare(views[0], other))] for other in views[1:]]
    if rows:
        columns = ("run", ">RL step", ">rollout", ">identical samples")
        output.table(f"speed-up over {views[0].name}", columns, rows)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, svg in files(views).items():
            (pictures / name).write_text(svg)
    page = out or runs[-1] / "report.html"
    page.write_text(as_html(views, page))
    output.wrote(str(page))
