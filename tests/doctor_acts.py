"""Checks that do what checks of a broken device do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from tlt.doctor.engines import Place


def pass_(place: Place) -> dict[str, Any]:
    return {"num_gpus": place.num_gpus}


def fail(place: Place) -> dict[str, Any]:
    raise AssertionError("two tokens differ")


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
