"""Runs of `tlt train` in child processes, which can be killed and resumed, and compared."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 300.0
"""Seconds without an RL step after which a run counts as hung."""
MARK = "TLT_BENCHMARK"
"""Environment variable by which processes of a run are known, also when their driver is dead."""
TINY_MODEL = (
    "models tiny --out models/tiny",
    "models sft --model models/tiny --out models/tiny-sft --task gcd --sizes 2,2,2 "
    "--parameter max_value=9 --steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32",
)
"""Commands that make the policy of configs/tiny_gcd_cpu.toml."""
SAME = ("step", "policy_version", "reward/", "prompt/", "response/", "eval/", "learner/")
"""Beginnings of the metrics that follow from samples and updates, with `rollout/output_tokens`."""
NOT_SAME = ("learner/tokens_per_s", "learner/restarts")


def make_tiny_policy(home: Path) -> None:
    if not (home / "models" / "tiny-sft" / "model.safetensors").exists():
        for arguments in TINY_MODEL:
            command = [sys.executable, "-m", "tlt", *arguments.split()]
            subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL)


class Run:
    """A run in a child process, which can be started again."""

    def __init__(self, home: Path, name: str, config: Path, *settings: str, nice: int = 0) -> None:
        self.home, self.name, self.folder = home, name, home / "runs" / name
        self._nice, self._config = nice, config
        self._settings = [f"run.out=runs/{name}", f"debug.core_group={self.folder.name}", *settings]
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.told_to_end = False
        """Whether a fault has ended the driver, or asked it to end."""
        self._first_step = 0
        self._mark = uuid.uuid4().hex
        self._log = self.folder.with_suffix(".log")

    def start(self, *settings: str) -> None:
        self.starts += 1
        self.told_to_end = False
        self._first_step = self.last_step()
        resume = ["--resume"] if (self.folder / "config.toml").exists() else []
        command = [sys.executable, "-m", "tlt", "train", str(self._config), *self._settings]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *settings, *resume],
                cwd=self.home,
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: self._mark},
                preexec_fn=lambda: os.nice(self._nice),
            )

    def finish(self, *settings: str) -> None:
        """Run to the end; fail if that does not work."""
        self.start(*settings)
        self.wait()

    def wait(self) -> None:
        assert self.process is not None
        if self.process.wait() != 0:
            log = self._log.read_text()[-2000:]
            sys.exit(f"{self.name} ended with {self.process.returncode}:\n{log}")

    def end(self, number: int) -> None:
        """Send the driver a signal, and wait until it has ended."""
        assert self.process is not None
        self.told_to_end = True
        self.process.send_signal(number)
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            sys.exit(f"the driver has not ended {LIMIT_S:.0f} s after signal {number}")

    def rewind(self, step: int) -> None:
        """Forget what comes after an RL step: the next start goes on from there."""
        for newer in [path for path in self.checkpoints() if path.name > f"step-{step:06d}"]:
            shutil.rmtree(newer)

    def kill(self) -> None:
        """Kill all processes of the run."""
        for process in self.tree():
            with suppress(psutil.Error):
                process.kill()

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_step(self) -> int:
        """Return the last RL step with a record, by the end of the file alone."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
                lines = file.read().splitlines(keepends=True)[-2:]
        except FileNotFoundError:
            return 0
        whole = [line for line in lines if line.endswith(b"\n") and line.startswith(b"{")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def moved(self) -> bool:
        """Return whether the run has made an RL step since its last start."""
        return self.last_step() > self._first_step

    def tree(self) -> list[psutil.Process]:
        """Return the living processes of this run, also those that outlived their driver."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def driver(self) -> psutil.Process | None:
        if self.process is None or self.process.poll() is not None:
            return None
        return psutil.Process(self.process.pid)

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the processes of a kind that run, so neither dead nor stopped."""
        found = []
        for process in self.tree():
            with suppress(psutil.Error):
                alive = process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
                if alive and title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-??????"))


# --- comparison -----------------------------------------------------------------------------------


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record that must be equal in equal runs."""
    return {
        name: value
        for name, value in record.items()
        if name == "rollout/output_tokens" or (name.startswith(SAME) and name not in NOT_SAME)
    }


def samples_of(run: Run, step: int) -> list[str]:
    path = run.folder / "samples" / f"step-{step:06d}.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def weights_of(run: Run) -> str:
    """Return a digest of the final weights, name by name and bit by bit."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(run.folder / "policy" / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
            digest.update(file.get_tensor(name).numpy().tobytes())
    return digest.hexdigest()


def same(one: Run, other: Run) -> dict[str, bool]:
    """Compare the RL steps, metrics, samples and policies of two runs."""
    a, b = one.records(), other.records()
    steps = [int(record["step"]) for record in a]
    return {
        "steps": steps == [int(record["step"]) for record in b],
        "metrics": list(map(lasting, a)) == list(map(lasting, b)),
        "samples": all(samples_of(one, step) == samples_of(other, step) for step in steps),
        "policy": weights_of(one) == weights_of(other),
    }
