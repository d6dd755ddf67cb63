"""The report of the checks: one JSON file, written anew after every check."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlt.doctor import isolated
from tlt.doctor.checks import CHECKS
from tlt.doctor.isolated import Check, Result
from tlt.doctor.place import Place
from tlt.errors import ConfigError

MODELS = Check(
    "models",
    "A tiny random policy and a trained drafter are made on the CPU.",
    "tlt.doctor.models:make",
)
FORMAT = 1
Show = Callable[[Check, Result | None], None]
"""`show(check, result)`: a check begins (None), or has ended."""


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of these names; all of them for no names."""
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]} is not a check; one of {', '.join(known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def run_checks(
    checks: Sequence[Check],
    num_gpus: int,
    limit_s: float,
    out: Path,
    facts: dict[str, Any],
    show: Show,
    models: Path | None = None,
) -> list[Result]:
    """Run the checks one after the other, and return their results.

    Args:
        checks: what to run.
        num_gpus: GPUs of this machine; 0 runs the checks on CPU engines.
        limit_s: seconds that each check may take.
        out: file of the report, which is whole after every check.
        facts: what the report says about the machine.
        show: told when a check begins and when it has ended.
        models: folder that holds `policy` and `drafter`; None makes them.
    """
    folder = Path(tempfile.mkdtemp(prefix="tlt-doctor-models-"))
    results: list[Result] = []
    try:
        for name in ("policy", "drafter") if models else ():
            (folder / name).symlink_to((Path(str(models)) / name).resolve())
        place = Place(str(folder), num_gpus)
        for check in (MODELS, *checks):
            show(check, None)
            if results and results[0].status != "passed":
                result = isolated.skipped(check, "there are no models to run it with")
            else:
                result = isolated.run(check, place, limit_s)
            results.append(result)
            write(out, facts, results)
            show(check, result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def write(out: Path, facts: dict[str, Any], results: Sequence[Result]) -> None:
    """Write the report; a reader never sees half of it."""
    report = {
        "format": FORMAT,
        "verdict": verdict(results),
        **facts,
        "checks": [asdict(result) for result in results],
    }
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps(report, indent=1, default=str) + "\n")
    partial.rename(out)


def verdict(results: Sequence[Result]) -> str:
    """Return the results in one sentence."""
    passed = sum(result.status == "passed" for result in results)
    bad = [result.name for result in results if result.status not in ("passed", "skipped")]
    left_out = [result.name for result in results if result.status == "skipped"]
    text = f"{passed} checks passed"
    text += f", {len(bad)} did not: {', '.join(bad)}" if bad else ""
    return text + (f"; skipped: {', '.join(left_out)}" if left_out else "")
