"""How much faster one run is than another, whether that is more than noise, and why.

Pure: computed from two `RunView`s of runs with the same work. Both runs must have the same lengths
and seeds: then their RL steps are pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from tlt.contracts import DRAFTERS, Arm
from tlt.observe.summary import Record, series, summary
from tlt.report.view import TOTALS, RunView, arms, harvest, reclaimed, same_samples

V = TypeVar("V")
RESAMPLES = 4000
LEVEL = 0.95
MIN_PAIRS = 3
"""Fewest pairs of RL steps that say something about noise."""

RATIOS = ("step", "rollout", "rollout_per_token")
"""Figures of a comparison."""
LABELS = {"off": "no drafts"} | {name: drafter.label for name, drafter in DRAFTERS.items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios, and the range that holds it with 95% confidence."""

    median: float
    low: float
    high: float

    @property
    def range(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.range})"


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as the base a run is, over the RL steps after the first."""

    num_pairs: int
    step: Ratio
    rollout: Ratio
    rollout_per_token: Ratio
    """The fair figure where response lengths differ by chance."""
    update: Ratio
    """The policy update, which is the same work in both runs: any difference is noise."""
    drift: float
    """How many times as fast the machine itself was in the run: the median ratio of the updates, or
    of the shares of engine seconds within their emulated time."""
    base_s: float
    """Median seconds of an RL step of the base."""
    other_s: float
    """Median seconds of an RL step of the run."""

    @property
    def is_clear(self) -> bool:
        """Whether the gain is larger than what chance and the machine's drift explain."""
        drift = max(self.drift, 1 / self.drift)
        return self.num_pairs >= MIN_PAIRS and self.step.low > 1 and self.step.median > drift

    @property
    def is_loss(self) -> bool:
        """Whether the run is slower by more than chance and drift explain."""
        drift = min(self.drift, 1 / self.drift)
        return self.num_pairs >= MIN_PAIRS and self.step.high < 1 and self.step.median < drift


def gain(base: RunView, other: RunView) -> Gain | None:
    """Compare the RL steps that both runs have, without the first; None if there are none."""
    names = ("time/step_s", "time/rollout_s", "time/update_s")
    pairs = equal_steps(base, other)[1:]
    pairs = [p for p in pairs if all(r.get(name, 0.0) > 0 for r in p for name in names)]
    if not pairs:
        return None

    def ratio(value: Callable[[Record], float]) -> Ratio:
        return paired([(value(mine), value(theirs)) for mine, theirs in pairs])

    def on_time(record: Record) -> float:
        return 1 - min(0.99, record.get("emulate/late_s_share", 0.0))

    tokens = "rollout/output_tokens"
    update = ratio(lambda r: r["time/update_s"])
    drift = update.median
    if other.emulated:
        drift = median(on_time(theirs) / on_time(mine) for mine, theirs in pairs)
    return Gain(
        len(pairs),
        step=ratio(lambda r: r["time/step_s"]),
        rollout=ratio(lambda r: r["time/rollout_s"]),
        rollout_per_token=ratio(lambda r: r["time/rollout_s"] / max(1.0, r.get(tokens, 0.0))),
        update=update,
        drift=drift,
        base_s=median(mine["time/step_s"] for mine, _ in pairs),
        other_s=median(theirs["time/step_s"] for _, theirs in pairs),
    )


def compare(base: RunView, other: RunView) -> dict[str, Any]:
    """Return the other run's speed-up, and what both runs have in common, ready for JSON.

    `whole` is over all RL steps that both have.
    """
    pairs = equal_steps(base, other)
    found = gain(base, other)
    base_s, other_s = (
        sum(pair[place].get("time/step_s", 0.0) for pair in pairs) for place in (0, 1)
    )
    return {
        "base": base.name,
        "run": other.name,
        "steps": len(pairs),
        "whole": base_s / other_s if other_s else 0.0,
        **{name: asdict(getattr(found, name)) if found else {} for name in RATIOS},
        "reward": {run.name: summary(run.records).get("reward", {}) for run in (base, other)},
        "same_reward": _agree(pairs, "reward/mean"),
        "same_tokens": _agree(pairs, "rollout/output_tokens"),
        "samples": same_samples(base, other),
    }


def in_words(found: Mapping[str, Any]) -> list[str]:
    """Return the ratios of RL steps and rollouts, and the identical samples, for people.

    Rollouts of other lengths count per token.
    """
    step, rollout, per_token = (
        str(Ratio(**found[name])) if found[name] else "-" for name in RATIOS
    )
    same, compared = found["samples"]["same"], found["samples"]["compared"]
    return [
        step,
        rollout if found["same_tokens"] else f"{per_token} per token",
        f"{same} of {compared}" if compared else "none kept",
    ]


def _agree(pairs: Sequence[tuple[Record, Record]], name: str) -> bool:
    """Return whether a metric is the same in every pair of RL steps."""
    return bool(pairs) and all(mine.get(name) == theirs.get(name) for mine, theirs in pairs)


def headline(base: RunView, other: RunView) -> str:
    """Return the comparison in one line."""
    found = gain(base, other)
    is_tlt = other.setting("tlt.enabled") and not base.setting("tlt.enabled")
    name = "TLT" if is_tlt else other.name
    if found is None or found.num_pairs < MIN_PAIRS:
        return f"Too few RL steps to compare {other.name} with {base.name}"
    if found.is_clear:
        return f"RL steps are {found.step.median:.2f}x faster with {name}"
    if found.is_loss:
        return f"RL steps are slower with {name}: {found.step.median:.2f}x"
    return f"No clear difference in speed with {name}"


def equal_steps(base: RunView, other: RunView) -> list[tuple[Record, Record]]:
    """Return the RL steps that both runs have, in pairs. The first one loads and compiles."""
    theirs = {record["step"]: record for record in other.records}
    return [(mine, theirs[mine["step"]]) for mine in base.records if mine["step"] in theirs]


def paired(values: Sequence[tuple[float, float]]) -> Ratio:
    """Return the median of the ratios and its bootstrap interval, over pairs of seconds."""
    ratios = [a / b for a, b in values]
    return Ratio(median(ratios), *interval(median, ratios))


def interval(
    compute: Callable[[Sequence[V]], float], values: Sequence[V], resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the range that holds `compute(values)` with 95% confidence.

    The same number of values is drawn with replacement each time, and always the same ones: two
    figures of the same values are computed from the same draws.
    """
    draw = random.Random(0)
    found = sorted(compute(draw.choices(values, k=len(values))) for _ in range(resamples))
    low, high = (round(share * (resamples - 1)) for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return found[low], found[high]


def drafting(view: RunView) -> dict[str, dict[str, float]]:
    """Return seconds, tokens, drafts, accepted tokens and their share by drafter, in all arms."""
    found: dict[str, dict[str, float]] = {}
    for arm, of in arms(view).items():
        total = found.setdefault(Arm.parse(arm).drafter, dict.fromkeys(TOTALS, 0.0))
        for name in TOTALS:
            total[name] += of[name]
    accepted = sum(of["accepted"] for of in found.values())
    for of in found.values():
        of["acceptance_length"] = 1 + of["accepted"] / of["drafts"] if of["drafts"] else 1.0
        of["saved_share"] = of["accepted"] / accepted if accepted else 0.0
    return {name: found[name] for name in LABELS if name in found}


def leases(view: RunView) -> dict[str, float]:
    """Return what idle workers did for the drafter; empty for a run without harvest."""
    totals = harvest(view)
    if not totals:
        return {}
    lengths = series(view.records, "harvest/held_out_length")[1]
    return {
        **reclaimed(view),
        "published": totals["published"],
        "trained_tokens": totals["trained_tokens"],
        "held_out_length": lengths[-1] if lengths else 0.0,
    }


def verdict(found: Gain | None) -> str:
    """Return the gain in words, or that it is within noise."""
    if found is None:
        return "The runs have no RL step to compare: the first one loads and compiles."
    over = (
        f"{found.other_s:.1f} s instead of {found.base_s:.1f} s, over {found.num_pairs} pairs of "
        "equal RL steps"
    )
    if found.is_clear:
        return f"TLT made RL steps {found.step.median:.2f}x as fast ({found.step.range}): {over}."
    measured = f"{found.step}, {over}."
    if found.is_loss:
        return f"TLT made RL steps slower here: {measured}"
    if found.num_pairs < MIN_PAIRS:
        return f"Too few RL steps to tell a gain from noise: {measured}"
    return f"The gain is within noise on this machine: {measured}"


def drift(found: Gain) -> str:
    """Return in words how much the machine's speed changed between the runs."""
    return (
        f"The policy update is the same work in both runs: it was {found.update} as fast in the "
        "second, which is machine noise."
    )


def as_data(base: RunView, other: RunView) -> dict[str, Any]:
    """Return the gain, its verdict and its origin, ready for JSON."""
    found = gain(base, other)
    measured: dict[str, Any] = {"num_pairs": 0}
    if found is not None:
        measured = {name: asdict(getattr(found, name)) for name in ("step", "rollout", "update")}
        measured |= {"num_pairs": found.num_pairs, "is_clear": found.is_clear}
        measured["step_s"] = {"off": found.base_s, "tlt": found.other_s}
    return {
        "emulated": other.emulated,
        "gain": measured,
        "verdict": verdict(found),
        "drift": drift(found) if found and not other.emulated else "",
        "drafts": drafting(other),
        "leases": leases(other),
    }
