"""Replay strategies on recorded step times: how close do they come to the best arm?

    python benchmarks/replay.py benchmarks/results/strategy/live/rollout.json

Writes `strategy.json`. The comparison always includes a table of step times from published H100
figures.

A `StepTable` holds the step time of each arm at each batch size, and the acceptance of each
drafter. `replay` runs a strategy against the table step by step, as an engine would: each step
verifies the drafts of the previous one, requests end one by one, and step times are noisy. The
`Oracle` reads the best arm from the table; its throughput on the same workload is the upper bound.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tlt.contracts import OFF, Arm, StepContext, StepReport, Strategy
from tlt.errors import ConfigError
from tlt.observe.provenance import provenance
from tlt.strategy.adaptive import Adaptive
from tlt.strategy.beg_mab import BegMab
from tlt.strategy.spec import Fixed
from tlt.tasks.tail import HeavyTail

Scenario = Callable[[float], float]
"""Maps the progress of a run, 0 to 1, to the power to which acceptance rates are raised. Power 1
leaves the rates as recorded; a larger power makes the drafter worse."""

NOISE = 0.1
"""Standard deviation of the logarithm of step times."""
SCENARIOS: dict[str, Scenario] = {
    "stationary": lambda progress: 1.0,
    "drifting": lambda progress: 3.0 - 2.6 * progress,
    "abrupt": lambda progress: 8.0 if 1 / 3 < progress < 2 / 3 else 0.7,
}


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step by arm and batch size, and acceptance by drafter and position."""

    seconds: dict[Arm, list[tuple[float, float]]]
    """Pairs of (batch size, seconds), rising, of steps that verify and draft with one arm."""
    accepted: dict[str, list[float]]
    """Share of requests whose draft is accepted at least up to each position."""
    drafted_share: dict[str, float]
    """Drafted tokens per requested token."""

    def __post_init__(self) -> None:
        """Make the rates fall with the position.

        A draft accepted up to a position is accepted up to all earlier ones, but recorded rates of
        different positions come from different steps and may say otherwise.
        """
        falling = {drafter: list(accumulate(r, min)) for drafter, r in self.accepted.items()}
        object.__setattr__(self, "accepted", falling)

    def step_s(self, batch: int, verified: Arm, proposed: Arm) -> float:
        """Return the time of a step. A step between two arms costs half of each, by assumption."""
        one = _interpolate(self.seconds[verified], batch)
        return one if verified == proposed else (one + self.step_s(batch, proposed, proposed)) / 2

    def rate(self, drafter: str, position: int, power: float) -> float:
        """Return the share of requests whose draft is accepted up to a position."""
        rates = self.accepted[drafter]
        return float(rates[position] ** power) if position < len(rates) else 0.0

    def tokens(self, arm: Arm, power: float) -> float:
        """Return the expected tokens of one request and step."""
        return 1 + sum(self.rate(arm.drafter, i, power) for i in range(arm.num_draft_tokens))

    def best(self, batch: int, power: float) -> Arm:
        """Return the arm with the most tokens per second."""
        return max(
            self.seconds, key=lambda arm: self.tokens(arm, power) / self.step_s(batch, arm, arm)
        )

    @classmethod
    def load(cls, path: Path) -> StepTable:
        """Load the table from the result of a `tlt drafter bench`."""
        steps = json.loads(path.read_bytes())["steps"]
        seconds = {
            Arm(row["drafter"], row["num_draft_tokens"]): [(b, s) for b, s in row["seconds"]]
            for row in steps["arms"]
        }
        table = cls(seconds, steps["accepted"], steps["drafted_share"])
        widest = max((points[-1][0] for points in table.seconds.values()), default=0.0)
        for arm, points in list(table.seconds.items()):
            if arm != OFF and (len(points) < 3 or points[-1][0] < widest / 4):
                del table.seconds[arm]  # a strategy's rare trials: too little to replay
        if OFF not in table.seconds or len(table.seconds) < 2:
            raise ConfigError(
                f"{path}: of its arms only {', '.join(map(str, table.seconds)) or 'none'} ran at "
                "three batch sizes or more; a replay needs 'off' and another one, e.g. --mode off "
                "--mode eagle3:2 --requests 32"
            )
        return table


def _interpolate(points: Sequence[tuple[float, float]], batch: float) -> float:
    index = bisect_left(points, (batch, 0.0))
    if index == 0 or len(points) == 1:
        return points[0][1]
    if index == len(points):
        index -= 1  # beyond the last point: extrapolate from the last two
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return max(y0 + (y1 - y0) * (batch - x0) / (x1 - x0), 0.5 * min(y0, y1))


@dataclass(slots=True)
class Run:
    """State of a replayed engine, for the oracle."""

    table: StepTable
    scenario: Scenario
    progress: float = 0.0


class Oracle:
    """Takes the best arm by the table and the scenario."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[tuple[int, float], Arm] = {}

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        return frozenset(self._run.table.seconds)

    def decide(self, context: StepContext) -> Arm:
        power = round(self._run.scenario(self._run.progress), 2)
        key = (context.num_decodes, power)
        if key not in self._known:
            self._known[key] = self._run.table.best(*key)
        return self._known[key]

    def observe(self, report: StepReport) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay."""

    tokens_per_s: float
    switches: int
    reports: list[StepReport]


def replay(
    make_strategy: Callable[[Run], Strategy],
    table: StepTable,
    scenario: Scenario,
    rollouts: Sequence[Sequence[int]],
    seed: int,
) -> Replayed:
    """Replay rollouts of these response lengths one after another.

    The random number that decides a draft's acceptance belongs to the token at its start: by the
    same seed, every strategy drafts the same text.
    """
    host, text = random.Random(f"{seed}/host"), random.Random(f"{seed}/text")
    run = Run(table, scenario)
    strategy = make_strategy(run)
    total = sum(map(sum, rollouts))
    done = switches = step = 0
    clock_s = 0.0
    verified = OFF
    reports = []
    for lengths in rollouts:
        left = list(lengths)
        luck = [[text.random() for _ in range(length)] for length in lengths]
        while left:
            run.progress = done / total
            power = scenario(run.progress)
            context = StepContext(step, len(left), 0, 0)
            proposed = strategy.decide(context)
            switches += proposed != verified
            points = [drawn[rest - 1] for drawn, rest in zip(luck, left, strict=True)]
            gains, drafted, accepted_at = _verify(table, verified, points, power)
            seconds = table.step_s(len(left), verified, proposed)
            seconds *= math.exp(host.gauss(0, NOISE))
            clock_s += seconds
            output = sum(min(gain, rest) for gain, rest in zip(gains, left, strict=True))
            report = StepReport(
                step=step,
                verified=verified,
                proposed=proposed,
                num_decodes=len(left),
                num_prefill_tokens=0,
                num_drafts=len(left) if drafted else 0,
                num_draft_tokens=drafted,
                num_accepted_tokens=sum(accepted_at),
                accepted_at=tuple(accepted_at),
                num_output_tokens=output,
                elapsed_s=seconds,
                ended_s=clock_s,
            )
            strategy.observe(report)
            reports.append(report)
            luck = [
                drawn for drawn, rest, gain in zip(luck, left, gains, strict=True) if rest > gain
            ]
            left = [rest - gain for rest, gain in zip(left, gains, strict=True) if rest > gain]
            done += output
            verified = proposed
            step += 1
    return Replayed(done / clock_s, switches, reports)


def _verify(
    table: StepTable, arm: Arm, points: Sequence[float], power: float
) -> tuple[list[int], int, list[int]]:
    """Return the tokens that each request gains, drafted tokens, and acceptances by position.

    A draft is accepted up to the first position whose rate is no larger than its point.
    """
    rates = [table.rate(arm.drafter, i, power) for i in range(arm.num_draft_tokens)]
    gains = []
    accepted_at = [0] * len(rates)
    for point in points:
        length = 0
        while length < len(rates) and point < rates[length]:
            accepted_at[length] += 1
            length += 1
        gains.append(1 + length)
    share = table.drafted_share.get(arm.drafter, 1.0)
    return gains, round(len(points) * arm.num_draft_tokens * share), accepted_at


def published_h100() -> StepTable:
    """Return a table with the H100 figures of the TLT paper (arXiv 2511.16665).

    The paper states the speed-up by batch size at 16 and at 64 verified tokens, and an acceptance
    length of 4.59 before adaptation. Three assumptions fill the gaps: 4.59 is the length at 64
    tokens, 4.0 is the length at 16 tokens, and a plain step takes the same time up to batch 32. The
    time of a step is then its acceptance length over its speed-up. The rates mix two kinds of text,
    one of them rare and always accepted, so that they add up to these two lengths.
    """
    speedups = {
        16: [(1, 3.22), (2, 3.08), (4, 3.01), (8, 2.73), (16, 2.67), (32, 2.48)],
        64: [(1, 3.62), (2, 3.38), (4, 2.98), (8, 2.27), (16, 1.91), (32, 1.70)],
    }
    easy = (4.59 - 4.0) / 48
    rates = [easy + (0.75 - easy) * 0.73892**i for i in range(16)] + [easy] * 48
    table: dict[Arm, list[tuple[float, float]]] = {OFF: [(1, 0.01), (32, 0.01)]}
    for length, points in speedups.items():
        gained = 1 + sum(rates[:length])
        table[Arm("eagle3", length)] = [(b, 0.01 * gained / speedup) for b, speedup in points]
    return StepTable(table, {"eagle3": rates}, {"eagle3": 1.0})


def compare(
    table: StepTable,
    strategies: dict[str, Callable[[Run], Strategy]],
    rollouts: Sequence[Sequence[int]],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Return the throughput of every strategy in every scenario, relative to the oracle's."""
    rows = []
    for name, scenario in SCENARIOS.items():
        best = [replay(Oracle, table, scenario, rollouts, seed).tokens_per_s for seed in seeds]
        for strategy, make in strategies.items():
            runs = [replay(make, table, scenario, rollouts, seed) for seed in seeds]
            ratios = [run.tokens_per_s / top for run, top in zip(runs, best, strict=True)]
            rows.append(
                {
                    "scenario": name,
                    "strategy": strategy,
                    "of_oracle": statistics.median(ratios),
                    "low": min(ratios),
                    "high": max(ratios),
                }
            )
    return rows


def contenders(table: StepTable) -> dict[str, Callable[[Run], Strategy]]:
    """Return the learning strategies with all arms of the table, and every arm by itself."""
    arms = list(table.seconds)
    strategies: dict[str, Callable[[Run], Strategy]] = {
        "adaptive": lambda run: Adaptive(arms),
        "beg_mab": lambda run: BegMab(arms, random.Random(0)),
    }
    for arm in sorted(arms, key=lambda arm: (arm.drafter != "off", str(arm))):
        strategies[str(arm)] = lambda run, arm=arm: Fixed(arm)  # type: ignore[misc]
    return strategies


def largest_batch(table: StepTable) -> int:
    """Return the largest recorded batch; times of larger batches would be guesses."""
    return int(table.seconds[OFF][-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recorded", nargs="?", type=Path, help="rollout.json with several arms")
    parser.add_argument("--requests", type=int, default=64, help="requests per rollout")
    parser.add_argument("--rollouts", type=int, default=12, help="rollouts, one after another")
    parser.add_argument("--median", type=int, default=60, help="median response length")
    parser.add_argument("--p95", type=int, default=500, help="95th percentile of the lengths")
    parser.add_argument("--longest", type=int, default=1500, help="longest response")
    parser.add_argument("--seeds", type=int, default=5, help="repeats with different seeds")
    parser.add_argument("--out", type=Path, default=Path("runs/strategy"), help="folder to write")
    options = parser.parse_args()
    tables = {}
    if options.recorded is not None:
        tables[f"recorded: {options.recorded}"] = StepTable.load(options.recorded)
    tables["made from published H100 figures"] = published_h100()
    rng, tail = random.Random(0), HeavyTail(options.median, options.p95, options.longest)
    work = [[tail.draw(rng) for _ in range(options.requests)] for _ in range(options.rollouts)]
    results = {}
    for name, table in tables.items():
        within = [lengths[: largest_batch(table)] for lengths in work]
        results[name] = compare(table, contenders(table), within, range(options.seeds))
        print(name)
        for row in results[name]:
            print(f"  {row['scenario']:12} {row['strategy']:12} {row['of_oracle']:.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "provenance": provenance(" ".join(["python", *sys.argv])),
        "results": results,
    }
    (options.out / "strategy.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
