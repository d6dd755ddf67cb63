"""A tiny run under one random fault after the other: nothing hangs, grows, or changes the policy.

    python benchmarks/soak.py [--minutes 90] [--every 20] [--seed 0]

`tlt train` of the tiny recipe, with harvest, in a child process. Every `--every` seconds a fault
comes: a process of the run is killed or stopped (SIGSTOP), the driver is killed, stopped for a
while or asked to end, the newest checkpoint is damaged, or the learner cannot write large files (a
limit on its files stands for a full disk). A driver that starts is left alone until its first RL
step: an engine that is lost before ends the run by rule, and a run that never gets so far shows
nothing. Rewards fail for one response in a hundred, always for the same ones. A driver that ended
is started again with `--resume`. Every 5 seconds: memory, shared memory, open files and processes
of the run.

An undisturbed run of the same seed goes on beside it, with low priority. In the end they are
compared: samples, rewards and every bit of the policy. The disturbed run is resumed from every
checkpoint that is left, and compared again. Writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from common import ROOT, parse_options, save
from runs import LIMIT_S, Run, make_tiny_policy, same

RECIPE = ROOT / "configs" / "tiny_gcd_cpu.toml"
SAMPLE_S = 5.0
END_S = 15.0
"""Seconds after the end of a driver in which all other processes of its run end."""
SETTINGS = (
    *("sampling.prompts_per_step=8", "sampling.group_size=4", "eval.every_steps=0"),
    *("checkpoint.every_steps=2", "checkpoint.keep=4", "run.checkpoint_on_term=true"),
    *("pool.max_restarts=100000", "pool.health_timeout_s=15", "pool.command_timeout_s=30"),
    *("learner.max_restarts=100000", "learner.timeout_s=40", "engine.stall_timeout_s=20"),
    "reward.function=soak_reward:score",
    *("tlt.enabled=true", "tlt.min_lease_s=0.1", "tlt.session_s=0.5", "tlt.lr=3e-3"),
)
REWARD = '''\
"""A reward that fails for one response in a hundred, always for the same ones."""

import zlib

from tlt.tasks.rewards import exact_score


def score(problem, text):
    if zlib.crc32(f"{problem.problem_id}/{text}".encode()) % 100 == 0:
        raise ValueError("no reward for this one")
    return exact_score(problem, text)
'''


def soaked(home: Path, name: str, *settings: str, nice: int = 0) -> Run:
    return Run(home, name, RECIPE, *SETTINGS, *settings, nice=nice)


# --- faults ---------------------------------------------------------------------------------------


class Faults:
    """The faults; each does its worst and returns whether it could."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run = run
        self._rng = random.Random(seed)
        self.kinds: dict[str, Callable[[], bool]] = {
            "kill an engine": lambda: self._signal("ray::EngineActor", signal.SIGKILL),
            "kill a learner rank": lambda: self._signal("ray::LearnerActor", signal.SIGKILL),
            "kill a trainer": lambda: self._signal("ray::TrainerActor", signal.SIGKILL),
            "kill a reward process": lambda: self._signal("spawn_main", signal.SIGKILL),
            "stop an engine": lambda: self._signal("ray::EngineActor", signal.SIGSTOP),
            "stop a learner rank": lambda: self._signal("ray::LearnerActor", signal.SIGSTOP),
            "stop a trainer": lambda: self._signal("ray::TrainerActor", signal.SIGSTOP),
            "stop the driver for 5 s": self._pause_driver,
            "kill the driver": lambda: self._end_driver(signal.SIGKILL),
            "ask the driver to end": lambda: self._end_driver(signal.SIGTERM),
            "damage the newest checkpoint": self._damage,
            "no room for a checkpoint": self._no_room,
        }

    def one(self) -> str:
        """Let one fault happen, and return its kind; empty if none is possible now."""
        if not self._run.moved():
            return ""
        kinds = list(self.kinds)
        self._rng.shuffle(kinds)
        return next((kind for kind in kinds if self.kinds[kind]()), "")

    def _signal(self, title: str, number: int) -> bool:
        found = self._run.processes(title)
        if not found:
            return False
        try:
            self._rng.choice(found).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def _pause_driver(self) -> bool:
        if (driver := self._run.driver()) is None:
            return False
        driver.suspend()
        time.sleep(5)
        driver.resume()
        return True

    def _end_driver(self, number: int) -> bool:
        process = self._run.process
        if process is None or process.poll() is not None:
            return False
        self._run.end(number)
        return True

    def _damage(self) -> bool:
        """Damage the newest checkpoint of a run whose driver dies, if another one is left."""
        if len(self._run.checkpoints()) < 2 or not self._end_driver(signal.SIGKILL):
            return False
        newest = self._run.checkpoints()[-1]
        path = self._rng.choice([p for p in (newest / "learner").rglob("*") if p.is_file()])
        content = bytearray(path.read_bytes())
        content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(content)
        return True

    def _no_room(self) -> bool:
        """Let no file of a rank grow beyond twice the policy: checkpoints are three times it."""
        found = self._run.processes("ray::LearnerActor")
        if not found:
            return False
        most = 2 * (self._run.home / "models/tiny-sft/model.safetensors").stat().st_size
        try:
            _, hard = found[0].rlimit(resource.RLIMIT_FSIZE)
            found[0].rlimit(resource.RLIMIT_FSIZE, (most, hard))
            time.sleep(6)
            found[0].rlimit(resource.RLIMIT_FSIZE, (hard, hard))
        except psutil.NoSuchProcess:
            pass
        return True


# --- what grows -----------------------------------------------------------------------------------


def sizes(run: Run) -> dict[str, float]:
    """Return memory, shared memory, open files and processes of a run."""
    private = files = processes = 0
    for process in run.tree():
        try:
            with process.oneshot():
                info = process.memory_info()
                private += max(0, info.rss - info.shared)
                files += process.num_fds()
                processes += 1
        except psutil.Error:
            continue
    shared = sum(
        path.stat().st_size
        for folder in Path("/dev/shm").glob(f"tlt-*/{run.name}-*")
        for path in folder.rglob("*")
        if path.is_file()
    )
    return {
        "memory_mib": private / 2**20,
        "shared_mib": shared / 2**20,
        "files": files,
        "processes": processes,
    }


def growth(values: Sequence[float], decile: int) -> float:
    """Return a decile of the last third over that of the first.

    The ninth tells what a whole run uses. A run that starts uses little: the fifth, the median,
    also tells how often it did.
    """
    third = max(2, len(values) // 3)
    parts = (values[:third], values[-third:])
    first, last = (statistics.quantiles(part, n=10)[decile - 1] for part in parts)
    return last / first if first else float(last > 0)


def grown(samples: Sequence[dict[str, float]], decile: int) -> dict[str, float]:
    names = ("memory_mib", "shared_mib", "files", "processes")
    return {n: round(growth([sample[n] for sample in samples], decile), 3) for n in names}


def soak(run: Run, minutes: float, every_s: float, seed: int) -> dict[str, Any]:
    """Disturb the run for so many minutes; return what happened."""
    faults = Faults(run, seed)
    events: list[dict[str, Any]] = []
    samples: list[dict[str, float]] = []
    began_s = next_sample_s = time.monotonic()
    next_fault_s, moved_s, longest_s = began_s + 2 * every_s, began_s, 0.0
    done, ended = 0, []
    run.start()
    while (now_s := time.monotonic()) < began_s + 60 * minutes:
        assert run.process is not None
        if (code := run.process.poll()) is not None:
            if not run.told_to_end:
                last = events[-1]["kind"] if events else ""
                ended.append({"at_s": round(now_s - began_s, 1), "code": code, "after": last})
            run.start()
        if now_s >= next_sample_s:
            next_sample_s += SAMPLE_S
            samples.append({"at_s": round(now_s - began_s, 1), **sizes(run)})
        step = run.last_step()
        if step != done:
            longest_s, moved_s, done = max(longest_s, now_s - moved_s), now_s, step
        if now_s - moved_s > LIMIT_S:
            sys.exit(f"no RL step in {LIMIT_S:.0f} s; the last faults were {events[-3:]}")
        if now_s >= next_fault_s:
            next_fault_s += every_s
            if kind := faults.one():
                events.append({"at_s": round(now_s - began_s, 1), "step": step, "kind": kind})
        time.sleep(0.2)
    if run.process is not None and run.process.poll() is None:
        run.end(signal.SIGTERM)
    time.sleep(END_S)
    return {
        "faults": events,
        "counts": dict(Counter(event["kind"] for event in events)),
        "samples": samples,
        "longest_without_step_s": round(max(longest_s, time.monotonic() - moved_s), 1),
        "ended_by_itself": ended,
        "starts": run.starts,
        "processes_left": len(run.tree()),
    }


# --- comparison -----------------------------------------------------------------------------------


def resumed_from_each(run: Run, num_steps: int) -> dict[str, bool]:
    """Resume copies of a finished run from every checkpoint; return whether each ends the same."""
    found = {}
    for checkpoint in run.checkpoints()[:-1]:
        copy = soaked(run.home, f"{run.name}-{checkpoint.name}")
        shutil.copytree(run.folder, copy.folder)
        shutil.rmtree(copy.folder / "policy")
        copy.rewind(int(checkpoint.name.removeprefix("step-")))
        settings = copy.folder / "config.toml"
        settings.write_text(settings.read_text().replace(f"runs/{run.name}", f"runs/{copy.name}"))
        copy.finish(f"run.num_steps={num_steps}")
        found[checkpoint.name] = all(same(run, copy).values())
        shutil.rmtree(copy.folder)
    return found


def main() -> None:
    options = parse_options(__doc__, minutes=90.0, every=20.0, seed=0, home=None)
    home = Path(options.home or tempfile.mkdtemp(prefix="tlt-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    (home / "soak_reward.py").write_text(REWARD)
    make_tiny_policy(home)
    disturbed = soaked(home, "disturbed", "run.num_steps=100000")
    record = home / "soak.json"
    forever = ("run.num_steps=100000", "checkpoint.keep=100000")
    undisturbed = soaked(home, "undisturbed", *forever, nice=10)
    if not record.exists():
        undisturbed.start()
        try:
            result = soak(disturbed, options.minutes, options.every, options.seed)
        finally:
            disturbed.kill()
            undisturbed.end(signal.SIGTERM)
        record.write_text(json.dumps(result))
    result = json.loads(record.read_text())
    num_steps = len(disturbed.records())
    print(f"{num_steps} RL steps, {len(result['faults'])} faults, {result['starts']} starts")
    steps = f"run.num_steps={num_steps}"
    disturbed.finish(steps)  # writes the policy
    undisturbed.rewind(num_steps)
    undisturbed.finish(steps)
    result |= {
        "minutes": options.minutes,
        "every_s": options.every,
        "num_steps": num_steps,
        "same": same(disturbed, undisturbed),
        "resumed_from": resumed_from_each(disturbed, num_steps),
        "growth": grown(result["samples"], 9),
        "growth_of_median": grown(result["samples"], 5),
    }
    save("soak", result)
    for name in ("counts", "ended_by_itself", "processes_left", "same", "resumed_from", "growth"):
        print(name, result[name])
    print("longest without an RL step:", result["longest_without_step_s"], "s")
    if not all((*result["same"].values(), *result["resumed_from"].values())):
        sys.exit("the run under faults is another run")


if __name__ == "__main__":
    main()
