"""How much faster one run is than another, whether that is more than noise, and what made it.

Pure: computed from two `RunView`s of runs with the same work. Both runs must have generated with
the same lengths and seeds, so that their RL steps are pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tlt.contracts import DRAFTERS, Arm
from tlt.observe.summary import Record, summary
from tlt.report.bootstrap import interval
from tlt.report.view import RunView, arms, harvest, reclaimed

MIN_PAIRS = 3
"""Fewest pairs of RL steps that say something about noise."""

LABELS = {"off": "no drafts"} | {name: drafter.label for name, drafter in DRAFTERS.items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios, and the range that holds it with 95% confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as the base a run is, over the RL steps after the first."""

    num_pairs: int
    step: Ratio
    rollout: Ratio
    update: Ratio
    """The policy update, which is the same work in both runs: any difference is noise."""
    step_s: tuple[float, float]
    """Median seconds of an RL step of base and run."""

    @property
    def is_clear(self) -> bool:
        """Whether the gain is larger than what chance and the machine's drift explain."""
        drift = max(self.update.median, 1 / self.update.median)
        return self.num_pairs >= MIN_PAIRS and self.step.low > 1 and self.step.median > drift

    @property
    def is_loss(self) -> bool:
        drift = min(self.update.median, 1 / self.update.median)
        return self.num_pairs >= MIN_PAIRS and self.step.high < 1 and self.step.median < drift


def gain(base: RunView, other: RunView) -> Gain | None:
    """Compare the RL steps that both runs have, without the first; None if there are none."""
    names = ("time/step_s", "time/rollout_s", "time/update_s")
    pairs = equal_steps(base, other)[1:]
    pairs = [p for p in pairs if all(r.get(name, 0.0) > 0 for r in p for name in names)]
    if not pairs:
        return None
    step, rollout, update = (paired([(a[name], b[name]) for a, b in pairs]) for name in names)
    middle = tuple(median(pair[place]["time/step_s"] for pair in pairs) for place in (0, 1))
    return Gain(len(pairs), step, rollout, update, (middle[0], middle[1]))


def compare(base: RunView, other: RunView) -> dict[str, Any]:
    """Return how many times as fast the other run is, as `gain` has it, ready for JSON.

    `whole` is over all RL steps that both have. Where response lengths differ by chance,
    `rollout_per_token` is the fair figure.
    """
    pairs = equal_steps(base, other)

    def ratios(value: Callable[[Record], float]) -> dict[str, float]:
        seconds = [(value(mine), value(theirs)) for mine, theirs in pairs[1:]]
        seconds = [pair for pair in seconds if all(value > 0 for value in pair)]
        return asdict(paired(seconds)) if seconds else {}

    base_s, other_s = (
        sum(pair[place].get("time/step_s", 0.0) for pair in pairs) for place in (0, 1)
    )
    return {
        "base": base.name,
        "run": other.name,
        "steps": len(pairs),
        "whole": base_s / other_s if other_s else 0.0,
        "step": ratios(lambda r: r.get("time/step_s", 0.0)),
        "rollout": ratios(lambda r: r.get("time/rollout_s", 0.0)),
        "rollout_per_token": ratios(
            lambda r: r.get("time/rollout_s", 0.0) / max(1.0, r.get("rollout/output_tokens", 0.0))
        ),
        "reward": {run.name: summary(run.records).get("reward", {}) for run in (base, other)},
    }


def in_words(ratio: Mapping[str, float]) -> str:
    """Return a ratio of `compare` for people."""
    return str(Ratio(**ratio)) if ratio else "-"


def equal_steps(base: RunView, other: RunView) -> list[tuple[Record, Record]]:
    """Return the RL steps that both runs have, in pairs. The first one loads and compiles."""
    theirs = {record["step"]: record for record in other.records}
    return [(mine, theirs[mine["step"]]) for mine in base.records if mine["step"] in theirs]


def paired(values: Sequence[tuple[float, float]]) -> Ratio:
    """Return the median of the ratios and its bootstrap interval, over pairs of seconds."""
    ratios = [a / b for a, b in values]
    return Ratio(median(ratios), *interval(median, ratios))


def drafting(view: RunView) -> dict[str, dict[str, float]]:
    """Return seconds, tokens, drafts, accepted tokens and their share by drafter, in all arms."""
    names = ("seconds", "tokens", "drafts", "accepted")
    found: dict[str, dict[str, float]] = {}
    for arm, of in arms(view).items():
        total = found.setdefault(Arm.parse(arm).drafter, dict.fromkeys(names, 0.0))
        for name in names:
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
    lengths = [r["harvest/held_out_length"] for r in view.records if "harvest/held_out_length" in r]
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
    base_s, other_s = found.step_s
    measured = (
        f"{found.step} over {found.num_pairs} pairs of equal RL steps, {other_s:.1f} s instead of "
        f"{base_s:.1f} s"
    )
    if found.is_clear:
        return f"TLT made RL steps {found.step.median:.2f}x as fast: {measured}."
    if found.is_loss:
        return f"TLT made RL steps slower here: {measured}."
    if found.num_pairs < MIN_PAIRS:
        return f"Too few RL steps to tell a gain from noise: {measured}."
    return f"The gain is within noise on this machine: {measured}."


def drift(found: Gain) -> str:
    """Return in words how much the machine's speed changed between the runs."""
    return (
        f"The policy update is the same work in both runs: it was {found.update} as fast in the "
        "second, which is noise of the machine."
    )


def as_data(base: RunView, other: RunView) -> dict[str, Any]:
    """Return the gain, its verdict, and what made it, ready for JSON."""
    found = gain(base, other)
    measured: dict[str, Any] = {"num_pairs": 0}
    if found is not None:
        measured = asdict(found) | {"is_clear": found.is_clear}
        measured["step_s"] = dict(zip(("off", "tlt"), found.step_s, strict=True))
    return {
        "gain": measured,
        "verdict": verdict(found),
        "drift": drift(found) if found else "",
        "drafts": drafting(other),
        "leases": leases(other),
    }
