"""Runs a check in a process group of its own, under a time limit.

Whatever a check does (fail, abort, hang, leave processes behind), the caller gets a result and a
device without leftovers. A check that hangs is told to print the stacks of all its threads and
engines before it is killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tlt.doctor.place import Place

Status = Literal["passed", "failed", "timed out", "crashed", "skipped"]
STACKS_S = 5.0
"""Seconds that a check gets to print its stacks."""
PRINTED_CHARS = 20_000
"""Characters of a check's output that a result keeps."""


@dataclass(frozen=True, slots=True)
class Check:
    """A function `(Place) -> notes` that raises if something is wrong."""

    name: str
    what: str
    """The claim that the check tests, in one sentence."""
    target: str
    """The function as `module:name`."""
    min_gpus: int = 0
    """GPUs without which the check is skipped."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the check's process on GPUs."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check."""

    name: str
    what: str
    status: Status
    seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the check reports."""
    error: str = ""
    """Why the check did not pass."""
    trace: str = ""
    """Traceback of the error, with the output of the engines."""
    printed: str = ""
    """End of the output of a check that did not pass."""


def skipped(check: Check, why: str) -> Result:
    """Return the result of a check that was not run."""
    return Result(check.name, check.what, "skipped", error=why)


def run(check: Check, place: Place, limit_s: float) -> Result:
    """Run a check in a process of its own; kill it after `limit_s` seconds."""
    if place.num_gpus < check.min_gpus:
        return skipped(check, f"needs {check.min_gpus} GPUs, found {place.num_gpus}")
    with tempfile.TemporaryDirectory(prefix="tlt-doctor-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        place.write(folder / "place.json")
        started_s = time.monotonic()
        code = _run_process(check, place, folder, limit_s)
        seconds = time.monotonic() - started_s
        answer = folder / "answer.json"
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if "notes" in found:
            return Result(check.name, check.what, "passed", seconds, found["notes"])
        status: Status = "failed"
        if not found:
            status = "timed out" if code is None else "crashed"
            why = f"no answer within {limit_s:g} s" if code is None else f"exit code {code}"
            found = {"error": f"{why}; see `printed`", "trace": ""}
        return Result(
            check.name,
            check.what,
            status,
            seconds,
            error=found["error"],
            trace=found["trace"],
            printed=_printed(folder),
        )


def _run_process(check: Check, place: Place, folder: Path, limit_s: float) -> int | None:
    """Return the exit code of the check's process, or None after the time limit."""
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "RAY_TMPDIR": "/tmp"} | dict(os.environ)
    environment |= {"TMPDIR": str(folder), "PYTHONFAULTHANDLER": "1"}
    if place.num_gpus:
        environment |= check.environment
    command = [sys.executable, "-m", "tlt.doctor", check.target]
    files = [str(folder / name) for name in ("place.json", "answer.json")]
    with (folder / "printed.log").open("wb") as printed:
        process = subprocess.Popen(
            [*command, *files],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_no_core_dumps,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)  # Python prints its stacks, then ends
        time.sleep(STACKS_S)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _no_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _printed(folder: Path) -> str:
    """Return what the check and the engines that it left behind have printed."""
    parts = [_tail(folder / "printed.log")]
    left = sorted(folder.glob("tlt-*/printed.log"))
    return "\n".join([*parts, *(f"--- {path.parent.name}\n{_tail(path)}" for path in left)])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace").strip()[-PRINTED_CHARS:]
