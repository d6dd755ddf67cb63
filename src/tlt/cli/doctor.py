"""`tlt doctor`: what this machine has, what works, and how to fix the rest."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from tlt.cli.options import Json, command_line, number, print_findings, print_json, say_written

if TYPE_CHECKING:
    from tlt.doctor.isolated import Result

MARKS = {"ok": ("green", "ok"), "info": ("blue", "--"), "bad": ("red", "missing")}


def doctor(
    run: Annotated[
        Path | None, typer.Option(help="Folder of a run: say what holds the run back.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test engines on this machine's GPU; write a report.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where to write the --gpu report.")] = Path(
        "tlt-doctor.json"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a check of --gpu to run; may be repeated.")
    ] = None,
    limit_s: Annotated[float, number("Seconds that a check of --gpu may take.", 1, 1e7)] = 600.0,
    as_json: Json = False,
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(hidden=True, help="Device of the checks of --gpu.")
    ] = "gpu",
) -> None:
    """Check the hardware, the engine and the features of this machine, or a run with --run.

    With --gpu, test real engines on the GPU and write a report to attach to an issue.
    """
    console = Console(stderr=as_json)
    if run is not None:
        _explain_run(console, run, as_json)
    elif gpu:
        _check_device(console, device, out, only or [], limit_s, as_json)
    else:
        findings = _find(console)
        num_broken = sum(finding["status"] == "bad" for finding in findings)
        if as_json:
            print_json({"findings": findings, "to_fix": num_broken})
        elif num_broken:
            console.print(f"[red]{num_broken} to fix[/] before rollouts can run here")
        else:
            console.print("[green]rollouts with speculation can run here[/]")
        raise typer.Exit(1 if num_broken else 0)


def _explain_run(console: Console, run: Path, as_json: bool) -> None:
    """Print what holds a run back."""
    from tlt.report.findings import findings
    from tlt.report.view import look_at

    view = look_at(run)
    if as_json:
        found = [{"kind": f.kind, "says": f.says, "change": f.change} for f in findings(view)]
        print_json({"run": view.name, "findings": found})
    else:
        print_findings(console, view)


def _find(console: Console) -> list[dict[str, str]]:
    """Print the findings about this machine as they come, and return them."""
    from tlt.doctor import machine

    found = []
    console.print("checking this machine; loading vLLM takes a few seconds", style="dim")
    for finding in machine.findings():
        color, mark = MARKS[finding.status]
        console.print(f"[{color}]{mark:8}[/][bold]{finding.what:24}[/]", end="", highlight=False)
        fix = f"; to fix it: {finding.fix}" if finding.fix else ""
        console.print(finding.found + fix, highlight=False, markup=False, soft_wrap=True)
        found.append(asdict(finding))
    return found


def _check_device(
    console: Console, device: str, out: Path, only: list[str], limit_s: float, as_json: bool
) -> None:
    """Run the checks of a device, and write their report; with `as_json` also print it."""
    from tlt.doctor import machine, report
    from tlt.errors import ConfigError
    from tlt.observe.provenance import provenance

    checks = report.chosen(only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of a check, too
    facts = machine.facts()
    gpus = facts["torch"]["devices"] if device == "gpu" else []
    if device == "gpu" and not gpus:
        raise ConfigError(machine.why_no_gpu(facts["torch"]))
    facts |= {"provenance": provenance(command_line()), "device": device}
    facts["findings"] = _find(console)

    def show(check: report.Check, result: Result | None) -> None:
        if result is None:
            console.print(
                f"{check.name}: {check.function.__doc__}", highlight=False, soft_wrap=True
            )
            return
        color = "red" if result.is_bad else "green" if result.status == "passed" else "blue"
        line = f"  [{color}]{result.status}[/] after {result.seconds:.1f} s"
        console.print(line, end="", highlight=False)
        why = f": {(result.error.splitlines() or [''])[0]}" if result.error else ""
        console.print(why, highlight=False, soft_wrap=True, markup=False)

    results = report.run_checks(checks, len(gpus), limit_s, out, facts, show)
    console.print(report.verdict(results), highlight=False)
    say_written(console, str(out))
    if as_json:
        print_json(json.loads(out.read_bytes()))
    if any(result.is_bad for result in results):
        console.print("please attach the file to an issue; read it first: it holds paths and logs")
        raise typer.Exit(1)
