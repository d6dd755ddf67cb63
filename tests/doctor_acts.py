"""Checks that do what checks of a broken device do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tlt.doctor.place import Place


def pass_(place: Place) -> dict[str, Any]:
    return {"num_gpus": place.num_gpus}


def fail(place: Place) -> dict[str, Any]:
    raise AssertionError("two tokens differ")


def crash(place: Place) -> dict[str, Any]:
    os.abort()


def hang(place: Place) -> dict[str, Any]:
    """Hang, with a child process that hangs too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(place.folder) / "child").write_text(str(child.pid))
    time.sleep(600)
    return {}
