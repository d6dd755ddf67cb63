"""The `tlt` command, as a user runs it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from speed import limit


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "tlt", *shlex.split(arguments)]


def tlt(arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        command(arguments), cwd=cwd, capture_output=True, text=True, timeout=limit(600)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
