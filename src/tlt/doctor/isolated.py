"""Calls a function in a separate process group, under a time limit.

The function may raise, abort, hang or leave processes behind: the caller gets a result and a device
without leftovers. A function that hangs is told to print the stacks of all its threads and engines
before it is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "timed out", "crashed", "skipped"]
STACKS_S = 5.0
"""Seconds for a hanging function to print its stacks."""
PRINTED_CHARS = 20_000
"""Characters of the output that a result keeps."""
_MESSAGES = (r"what\(\): *(.+)", r"(Fatal Python error.+)", r"^(\S*Error: .+)", r"(.*\S)")
"""Messages in the output of a process that crashed, the most telling one first."""
CHILD = "import sys; from tlt.doctor.isolated import answer; answer(sys.argv[1])"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check."""

    name: str
    what: str
    """The claim that the check tests, in one sentence."""
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

    @property
    def is_bad(self) -> bool:
        """Whether the check ran and did not pass."""
        return self.status not in ("passed", "skipped")


def run(
    function: Callable[..., Mapping[str, Any]],
    *arguments: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Call a function in a separate process, and kill the process after `limit_s` seconds.

    The function returns facts, or raises if something is wrong. Its docstring is the claim.
    """
    with tempfile.TemporaryDirectory(prefix="tlt-doctor-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "call").write_bytes(pickle.dumps((function, arguments)))
        began_s = time.monotonic()
        code = _run_process(folder, limit_s, environment or {})
        found: dict[str, Any] = {"seconds": time.monotonic() - began_s}
        if (folder / "answer").exists():
            found |= json.loads((folder / "answer").read_text())
        elif code is None:
            found |= {"status": "timed out", "error": f"no answer within {limit_s:g} s"}
        else:
            why = _first_message((folder / "printed.log").read_text(errors="replace"))
            found |= {"status": "crashed", "error": f"exit code {code}: {why}"}
        if found["status"] != "passed":
            # The check's, and its engines' or its run's.
            logs = [folder / "printed.log", *sorted(folder.glob("tlt-*/**/*.log"))]
            texts = [log.read_text(errors="replace").strip() for log in logs]
            found["printed"] = "\n".join(text[-PRINTED_CHARS:] for text in texts)
    return Result(function.__name__, function.__doc__ or "", **found)


def _run_process(folder: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """Return the exit code of the process, or None after the time limit."""
    defaults = {"VLLM_LOGGING_LEVEL": "INFO", "RAY_TMPDIR": "/tmp"}
    own = {"TMPDIR": str(folder), "PYTHONFAULTHANDLER": "1"}
    with (folder / "printed.log").open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**defaults, **os.environ, **own, **environment},
            start_new_session=True,
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
        with suppress(subprocess.TimeoutExpired):  # a hanging driver keeps its process
            process.wait(STACKS_S)


def answer(folder: str) -> None:
    """Call the function in this process, write its result, and end the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function, arguments = pickle.loads((Path(folder) / "call").read_bytes())
        found = {"status": "passed", "notes": function(*arguments)}
    except BaseException as error:
        # The process ends here, and the report gets every kind of error.
        said = f"{type(error).__name__}: {error}"
        found = {"status": "failed", "error": said, "trace": traceback.format_exc()}
    partial = Path(folder) / "partial"
    partial.write_text(json.dumps(found, default=str))
    partial.rename(Path(folder) / "answer")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a hanging engine must not delay the answer


def _first_message(output: str) -> str:
    """Return the line that says why a process crashed; later errors follow from the first one."""
    found = (re.search(pattern, output, re.MULTILINE) for pattern in _MESSAGES)
    return next((match[1] for match in found if match), "no output")
