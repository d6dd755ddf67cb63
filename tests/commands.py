"""The `tlt` command as a user runs it, and the records of a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from speed import limit

ROOT = Path(__file__).parents[1]
GCD = ROOT / "configs" / "tiny_gcd_cpu.toml"
TAIL = ROOT / "configs" / "tiny_tail_cpu.toml"


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "tlt", *shlex.split(arguments)]


def tlt(arguments: str, cwd: Path, code: int = 0) -> str:
    """Run a command that ends with this code; return what it printed, or its error."""
    done = subprocess.run(
        command(arguments), cwd=cwd, capture_output=True, text=True, timeout=limit(600)
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@contextmanager
def started(
    words: Sequence[str], cwd: Path, log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background, and kill it if it still runs at the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, cwd=cwd, stdout=file, stderr=file, env=os.environ | environment
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run; none before the run has written a whole line."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    """Wait for something that a run does."""
    deadline = time.monotonic() + limit(240)
    while not condition():
        assert process.poll() is None, f"the run ended while waiting for {what}"
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.05)


def wait_for_steps(count: int, run: Path, process: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: len(records(run)) >= count, process, f"RL step {count}")


def titled(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the living processes whose command line has these words."""
    found = []
    for process in processes:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
