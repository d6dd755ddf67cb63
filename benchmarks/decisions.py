"""Measure what a strategy's decisions cost per engine step, in processor time.

    python benchmarks/decisions.py --earlier results/earlier.json --out benchmarks/results

Writes `decisions.json`. The adaptive strategy has the arms off, n-grams of 2, 4 and 8 tokens, and
EAGLE-3 of 1, 3 and 7 tokens. It runs inside the controller, as in the scheduler of an engine, on
made-up engine steps of 8 ms and more. Batches come in rollouts that start full and end with one
request, and as one size throughout. The time that reading the clock takes is taken off. The digest
of all decisions tells whether two versions of the code decide alike: `--earlier` names the result
of the earlier version, to be kept beside this one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tlt.contracts import OFF, Arm
from tlt.observe.provenance import provenance
from tlt.strategy.adaptive import Adaptive
from tlt.strategy.controller import DraftController

ARMS = [OFF, *(Arm("ngram", k) for k in (2, 4, 8)), *(Arm("eagle3", k) for k in (1, 3, 7))]
CHANCES = {"eagle3": 0.66, "ngram": 0.35}
"""Chance of a draft token once all earlier ones are accepted."""
WORKLOADS = {"1": [1], "16": [16], "128": [128], "rollouts": [128, 96, 64, 33, 16, 9, 4, 2, 1]}
"""Batch sizes, each for an equal share of a rollout's engine steps."""
STEPS, ROLLOUT_STEPS = 4000, 500


class Clock:
    """A clock that stands still between engine steps."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step_s(batch: int, verified: Arm, proposed: Arm) -> float:
    """Return the made-up seconds of an engine step."""
    drafting = 0.0006 * proposed.num_draft_tokens if proposed.uses_model else 0.0
    return 0.008 + 2e-5 * batch + 8e-6 * batch * verified.num_draft_tokens + drafting


def run(batches: Sequence[int], num_steps: int = STEPS) -> tuple[float, str]:
    """Return the processor time per engine step in seconds, and a digest of all decisions."""
    rng, clock, spent_s = random.Random(0), Clock(), 0.0
    controller = DraftController(Adaptive(ARMS), clock)
    digest = hashlib.sha256()
    for step in range(num_steps):
        batch = batches[step % ROLLOUT_STEPS * len(batches) // ROLLOUT_STEPS]
        controller.drafter_version = step // 1500  # a publish now and then
        controller.schedule_started()
        began_s = time.process_time()
        record = controller.step_scheduled(batch, 0, 0, 0)
        spent_s += time.process_time() - began_s
        digest.update(str(record.proposed).encode())
        hard = 0.6 if step // 400 % 2 else 1.0  # text turns from easy to hard
        chance = hard * CHANCES.get(record.verified.drafter, 0.0)
        asked = record.verified.num_draft_tokens
        drafts = [(asked, _accepted(rng, chance, asked)) for _ in range(batch if asked else 0)]
        noise = math.exp(rng.gauss(0, 0.05))
        clock.now_s += noise * step_s(batch, record.verified, record.proposed)
        num_tokens = batch + sum(accepted for _, accepted in drafts)
        began_s = time.process_time()
        controller.step_finished(record, drafts, num_tokens)
        spent_s += time.process_time() - began_s
    return spent_s / num_steps - 2 * clock_s(), digest.hexdigest()[:16]


def clock_s() -> float:
    """Return the processor time between two readings of the clock, which is in every figure."""
    readings = [time.process_time() for _ in range(10_000)]
    return statistics.median(b - a for a, b in pairwise(readings))


def _accepted(rng: random.Random, chance: float, most: int) -> int:
    accepted = 0
    while accepted < most and rng.random() < chance:
        accepted += 1
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each workload")
    parser.add_argument("--earlier", type=Path, help="result of the earlier code")
    parser.add_argument("--out", type=Path, default=Path("runs/decisions"), help="folder to write")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, batches in WORKLOADS.items():
        runs = [run(batches) for _ in range(options.repeats)]
        costs = [1e3 * cost_s for cost_s, _ in runs]
        digests = {digest for _, digest in runs}
        assert len(digests) == 1, "the same reports gave different decisions"
        rows[name] = {"ms": statistics.median(costs), "low": min(costs), "high": max(costs)}
        rows[name]["decisions"] = digests.pop()
        print(f"batch {name}: {rows[name]['ms']:.3f} ms, decisions {rows[name]['decisions']}")
    report: dict[str, Any] = {
        "provenance": provenance(" ".join(["python", *sys.argv])),
        "steps": STEPS,
        "workloads": rows,
    }
    if options.earlier:
        earlier = json.loads(options.earlier.read_bytes())
        report["earlier"] = {
            "commit": earlier["provenance"]["commit"],
            "workloads": earlier["workloads"],
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decisions.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
