"""Runs that stay loaded and take turns, RL step by RL step.

Every arm is a `tlt train` of its own, with its own Ray, engines and learner. It stops at a gate
before every RL step (`debug.gate`, a Unix socket that this module listens on). While one arm has
its turn, the others sleep in the kernel. `Arms.turn` measures the CPU seconds of everybody: of the
arm, of the waiting arms, and of other processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

FINISH_S = 300.0
"""How long a run may take to write its policy and end."""


class RunEnded(Exception):
    """A run ended before its last RL step."""


class Run:
    """One arm's process, and the gate that it waits at."""

    def __init__(
        self, arm: str, command: Sequence[str], out: Path, gate: Path, env: Mapping[str, str]
    ) -> None:
        self.arm = arm
        self.out = out
        self._log = out.with_suffix(".log")
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(gate))
        self._listening.listen(1)
        self._gate: socket.socket | None = None
        places = [f'run.out="{out}"', f'debug.gate="{gate}"', f'debug.core_group="e2e-{arm}"']
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *places],
                stdout=log,
                stderr=log,
                env=dict(env),
            )
        self._seen: dict[int, psutil.Process] = {}
        self.wanted = 0
        """RL step that the run waits to take."""

    def wait_at_gate(self) -> int:
        """Return the RL step that the run wants to take, once it asks."""
        if self._gate is None:
            self._gate = self._accepted()
        line = b""
        while not line.endswith(b"\n"):
            received = self._gate.recv(64)
            if not received:
                raise RunEnded(f"the run of {self.arm} ended; see {self._log}")
            line += received
        self.wanted = int(line)
        return self.wanted

    def _accepted(self) -> socket.socket:
        self._listening.settimeout(1.0)
        while True:
            try:
                gate, _ = self._listening.accept()
                gate.settimeout(None)
                return gate
            except TimeoutError:
                if self._process.poll() is not None:
                    lines = self._log.read_text(errors="replace").splitlines()
                    said = [line for line in lines if line.startswith("error: ")]
                    raise RunEnded(
                        f"the run of {self.arm} did not start; see {self._log}. {' '.join(said)}"
                    ) from None

    def go(self) -> None:
        """Let the run take the RL step that it wants."""
        assert self._gate is not None
        self._gate.sendall(b"go\n")

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._process.pid)
            found = [driver, *driver.children(recursive=True)]
            self._seen |= {process.pid: process for process in found}
            return found
        return []

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far, with those of children that ended."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def finish(self) -> None:
        """Wait until the run has ended by itself."""
        if self._process.wait(FINISH_S):
            raise RunEnded(f"the run of {self.arm} failed after its last RL step; see {self._log}")

    def stop(self) -> None:
        """End whatever is left of the run."""
        self.processes()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):  # `is_running` knows pids that were reused
                if process.is_running():
                    process.kill()
        self._process.wait()
        for each in (self._gate, self._listening):
            if each is not None:
                each.close()


class Arms:
    """The runs of a group of arms, all loaded."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.arm: run for run in runs}
        self._cores = sorted(os.sched_getaffinity(0))

    def turn(self, arm: str, step: int) -> dict[str, Any]:
        """Let an arm take an RL step, and return what the turn took.

        A run that lost its learner asks for an earlier RL step again; it catches up in this turn.
        """
        run = self._runs[arm]
        attempts = 0
        begun = self._seconds()
        while run.wanted <= step:
            attempts += run.wanted == step
            run.go()
            run.wait_at_gate()
        spent = {name: after_s - begun[name] for name, after_s in self._seconds().items()}
        cpu_s = {each: spent[f"cpu of {each}"] for each in self._runs}
        used_s = sum(cpu_s.values()) + spent["benchmark"]
        return {
            "turn_s": spent["wall"],
            "attempts": attempts,
            "cores": len(self._cores),
            "cpu_s": cpu_s[arm],
            "waiting_cpu_s": {each: seconds for each, seconds in cpu_s.items() if each != arm},
            "other_cpu_s": max(0.0, spent["busy"] - used_s),
            "steal_s": spent["stolen"],
        }

    def _seconds(self) -> dict[str, float]:
        """Return the time, and the seconds so far in which cores were busy, or another virtual
        machine had a core that this one wanted."""
        every_core = psutil.cpu_times(percpu=True)
        cores = [every_core[core] for core in self._cores]
        own = psutil.Process().cpu_times()
        return {
            "wall": time.monotonic(),
            "busy": sum(c.user + c.nice + c.system + c.irq + c.softirq for c in cores),
            "stolen": sum(core.steal for core in cores),
            "benchmark": own.user + own.system,
            **{f"cpu of {arm}": run.cpu_s() for arm, run in self._runs.items()},
        }
