"""Checks that do what checks of a broken device do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tlt.doctor.engines import Place


def pass_(place: Place) -> dict[str, Any]:
    return {"num_gpus": place.num_gpus}


def fail(place: Place) -> dict[str, Any]:
    raise AssertionError("two tokens differ")


def fail_in_a_run(place: Place) -> dict[str, Any]:
    logs = Path(tempfile.gettempdir(), "tlt-run-colocated", "logs")
    logs.mkdir(parents=True)
    (logs.parent / "run.log").write_text("the driver gave up\n")
    (logs / "engine-0.log").write_text("CUDA error: an illegal memory access\n")
    subprocess.run(["echo", "tlt train says why"], check=True)
    raise AssertionError("tlt train ended with code 1")


def crash(place: Place) -> dict[str, Any]:
    """Abort as C++ does, with its message."""
    what = "  what():  Only a single TORCH_LIBRARY\nframe #0: RuntimeError: another\n"
    os.write(2, f"UserWarning: x\nterminate called\n{what}".encode())
    os.abort()


def hang(place: Place) -> dict[str, Any]:
    """Hang, with a child process that hangs too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place.folder / "child").write_text(str(child.pid))
    time.sleep(600)
    return {}
