"""`tlt doctor`: what this machine has, what works, and how to fix the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tlt.cli.diagnosis import Status, diagnose
from tlt.cli.options import print_findings


def doctor(
    run: Annotated[
        Path | None, typer.Option(help="Folder of a run: say what holds the run back.")
    ] = None,
) -> None:
    """Check the hardware, the engine and the features of this machine, or a run with --run."""
    console = Console()
    if run is not None:
        from tlt.report.view import look_at

        print_findings(console, look_at(run))
        return
    with console.status("checking this machine; loading vLLM takes a few seconds"):
        findings = diagnose()
    marks = {Status.OK: "[green]ok[/]", Status.INFO: "[blue]--[/]", Status.BAD: "[red]missing[/]"}
    table = Table(show_header=True, header_style="bold")
    table.add_column("")
    table.add_column("what")
    table.add_column("found")
    table.add_column("to fix it")
    for finding in findings:
        table.add_row(marks[finding.status], finding.what, finding.found, finding.fix)
    console.print(table)
    broken = [f for f in findings if f.status is Status.BAD]
    if broken:
        console.print(f"[red]{len(broken)} to fix[/] before rollouts can run here")
        raise typer.Exit(1)
    console.print("[green]rollouts with speculation can run here[/]")
