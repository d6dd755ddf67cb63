"""Seeded faults and bad input at full size: how many, how long it takes, and whether all pass.

    python benchmarks/faults.py [--seeds 1000] [--inputs 2000] [PART ...]

Runs the tests of `make test-all` that draw faults, part by part: `rollout`, `harvest`,
`run` and `tools` put a layer of faults between the driver and its actors, `input` gives bad input
to all commands. Writes benchmarks/results/faults.json; parts that are not named keep their record.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from typing import Any

from common import ROOT, load, save

LAYERS = {
    "rollout": ["rollout"],
    "harvest": ["harvest"],
    "run": ["train", "-k", "not True"],
    "tools": ["train", "-k", "True"],
}
"""Folder of the tests and what chooses some of them, by part."""
INPUT = "input"


def cpu_s() -> float:
    """Return the seconds of computing of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outcome(output: str) -> dict[str, int]:
    """Return how many tests passed and failed, from the last line of pytest."""
    lines = output.strip().splitlines() or [""]
    return {
        word: int(found[1]) if (found := re.search(rf"(\d+) {word}", lines[-1])) else 0
        for word in ("passed", "failed")
    }


def run(part: str, count: int) -> dict[str, Any]:
    """Run one part, and return its record."""
    variable = "TLT_FUZZ_INPUTS" if part == INPUT else "TLT_FAULT_SEEDS"
    folder, *chosen = ["cli"] if part == INPUT else LAYERS[part]
    tests = f"tests/unit/{folder}/{'test_fuzz' if part == INPUT else 'test_fault_layer'}.py"
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", tests, *chosen]
    environment = os.environ | {variable: str(count)}
    began_s, began_cpu_s = time.monotonic(), cpu_s()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    return {
        "command": f"{variable}={count} pytest {shlex.join([tests, *chosen])}",
        "count": count,
        "seconds": round(time.monotonic() - began_s, 1),
        "cpu_seconds": round(cpu_s() - began_cpu_s, 1),
        **outcome(done.stdout),
        "exit_code": done.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[*LAYERS, INPUT], choices=[*LAYERS, INPUT])
    parser.add_argument("--seeds", type=int, default=1000, help="of each layer of faults")
    parser.add_argument("--inputs", type=int, default=2000)
    options = parser.parse_args()
    failed = False
    for part in options.parts:
        found = run(part, options.inputs if part == INPUT else options.seeds)
        failed |= found["exit_code"] != 0
        save("faults", {"parts": load("faults").get("parts", {}) | {part: found}})
    sys.exit(failed)


if __name__ == "__main__":
    main()
