"""`tlt doctor`: what this machine has, what works, and how to fix the rest."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tlt.cli.options import Json, number, option
from tlt.cli.output import Output, command_line
from tlt.cli.progress import awaited

if TYPE_CHECKING:
    from tlt.doctor.isolated import Result

MARKS = {"ok": ("green", "ok"), "info": ("blue", "--"), "bad": ("red", "missing")}


def doctor(
    run: Annotated[Path | None, option("Folder of a run: say what holds the run back.")] = None,
    gpu: Annotated[
        bool, option("Test engines on this machine's GPU; write a report.", "--gpu")
    ] = False,
    out: Annotated[Path, option("Where to write the --gpu report.")] = Path("tlt-doctor.json"),
    only: Annotated[
        list[str] | None, option("Name of a check of --gpu to run; may be repeated.")
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
    output = Output(as_json)
    if run is not None:
        _explain_run(output, run)
    elif gpu:
        _check_device(output, device, out, only or [], limit_s)
    else:
        findings = _find(output)
        num_broken = sum(finding["status"] == "bad" for finding in findings)
        output.result({"findings": findings, "to_fix": num_broken})
        if num_broken:
            output.say(f"{num_broken} to fix before rollouts can run here", style="red")
            raise typer.Exit(1)
        output.say("rollouts with speculation can run here", style="green")


def _explain_run(output: Output, run: Path) -> None:
    """Print what holds a run back."""
    from tlt.report.findings import findings
    from tlt.report.view import look_at

    view = look_at(run)
    found = findings(view)
    as_data = [{"kind": f.kind, "says": f.says, "change": f.change} for f in found]
    output.result({"run": view.name, "findings": as_data})
    output.findings(found)


def _find(output: Output) -> list[dict[str, str]]:
    """Print the findings about this machine as they come, and return them."""
    from tlt.doctor import machine

    found = []
    output.note("checking this machine; loading vLLM takes a few seconds", style="dim")
    for finding in awaited(machine.findings(), "checking"):
        color, mark = MARKS[finding.status]
        output.note(f"{mark:8}", color, end="")
        output.note(f"{finding.what:24}", "bold", end="")
        output.note(finding.found + (f"; to fix it: {finding.fix}" if finding.fix else ""))
        found.append(asdict(finding))
    return found


def _check_device(output: Output, device: str, out: Path, only: list[str], limit_s: float) -> None:
    """Run the checks of a device, and write their report; with `--json` also print it."""
    from tlt.doctor import machine, report
    from tlt.errors import ConfigError
    from tlt.observe.provenance import provenance

    checks = report.chosen(only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of a check, too
    facts = machine.facts()
    gpus = facts["torch"]["devices"] if device == "gpu" else []
    why = machine.why_no_gpu(facts["torch"]) if device == "gpu" and not gpus else ""
    if why and not facts["nvidia_smi"]:
        raise ConfigError(why)
    facts |= {"provenance": provenance(command_line()), "device": device}
    facts["findings"] = _find(output)
    if why:  # the driver is installed: its output and torch's show the cause
        report.write(out, facts, [])
        raise ConfigError(f"{why}. {out} has what driver and torch report, for an issue")

    def show(check: report.Check, result: Result | None) -> None:
        if result is None:
            output.note(f"{check.name}: {check.function.__doc__}")
            return
        color = "red" if result.is_bad else "green" if result.status == "passed" else "blue"
        output.note(f"  {result.status}", color, end="")
        why = f": {(result.error.splitlines() or [''])[0]}" if result.error else ""
        output.note(f" after {result.seconds:.1f} s{why}")

    results = report.run_checks(checks, len(gpus), limit_s, out, facts, show)
    output.note(report.verdict(results))
    output.marked("wrote", "green", str(out))
    output.result(json.loads(out.read_bytes()))
    if any(result.is_bad for result in results):
        output.note("please attach the file to an issue; read it first: it contains paths and logs")
        raise typer.Exit(1)
