"""Paired ratios of arms that took turns: order, marks, median and bootstrap interval. Pure.

A turn is one RL step of one arm, as `turns.py` records it. A pair is the turn of the reference and
the turn of another arm in the same RL step, seconds apart. A pair with a mark does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tlt.report.gain import interval

WAITING_CORES = 0.15
"""Cores that a waiting arm may keep busy during a turn; its Ray, engines and learner need 0.06."""
OTHER_SHARE = 0.05
"""Share of the cores' time that processes outside the benchmark, or other virtual machines, may use
during a turn."""

Turn = dict[str, Any]
Pair = tuple[Turn, Turn]

MEASURES: dict[str, Callable[[Turn], float]] = {
    "end_to_end": lambda turn: turn["end_to_end_s"],
    "rollout": lambda turn: turn["rollout_s"],
    "rollout_per_token": lambda turn: turn["rollout_s"] / turn["output_tokens"],
}


def order(arms: Sequence[str], step: int) -> list[str]:
    """Return the order of the arms in an RL step: each step begins with another arm."""
    first = step % len(arms)
    return [*arms[first:], *arms[:first]]


def groups(arms: Sequence[str], reference: str, at_once: int) -> list[list[str]]:
    """Return which arms are loaded together: the reference, and as many others as there is room."""
    if at_once < 2:
        raise ValueError(f"at_once = {at_once}: a comparison needs at least 2 arms, e.g. 2")
    others = [arm for arm in arms if arm != reference]
    size = at_once - 1
    return [[reference, *others[i : i + size]] for i in range(0, len(others), size)]


def marks(turn: Turn) -> list[str]:
    """Return why a turn should not count; empty for a good one."""
    found = []
    if turn["attempts"] > 1 or turn["metrics"].get("rollout/engine_restarts"):
        found.append("aborted")
    if any(s > WAITING_CORES * turn["turn_s"] for s in turn["waiting_cpu_s"].values()):
        found.append("waiting arm busy")
    if turn["other_cpu_s"] > OTHER_SHARE * turn["turn_s"] * turn["cores"]:
        found.append("other processes busy")
    if turn["steal_s"] > OTHER_SHARE * turn["turn_s"] * turn["cores"]:
        found.append("cores stolen")
    return found


def pairs(turns: Sequence[Turn], arm: str, reference: str) -> list[Pair]:
    """Return the pairs of an arm with the reference that was loaded beside it, by RL step."""
    at = {(turn["group"], turn["step"], turn["arm"]): turn for turn in turns}
    return [
        (at[group, step, reference], turn)
        for (group, step, name), turn in sorted(at.items())
        if name == arm and (group, step, reference) in at
    ]


def speed_up(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return how many times as fast as the reference an arm is.

    `values` are the seconds of the reference and of the arm. `median` is that of the ratios, pair
    by pair; `total` is the ratio of the summed seconds. Both have a bootstrap interval over pairs.
    """
    found: dict[str, float] = {}
    for name, of in {"median": _median, "total": _total}.items():
        low, high = interval(of, values)
        found |= {name: of(values), f"{name}_low": low, f"{name}_high": high}
    return found


def _median(values: Sequence[tuple[float, float]]) -> float:
    return statistics.median(a / b for a, b in values)


def _total(values: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in values) / sum(b for _, b in values)


def compare(turns: Sequence[Turn], arm: str, reference: str, warm_up: int) -> dict[str, Any]:
    """Return an arm's speed-ups, by thirds too, the pairs that do not count, and why.

    `same_samples` says whether both arms generated the same samples in all pairs; otherwise
    `first_difference` is the first RL step in which they did not. `every_pair` counts the marked
    ones, too: on a machine that other virtual machines use, few pairs may be left.
    """
    found = pairs(turns, arm, reference)
    left_out = {pair[1]["step"]: sorted({*marks(pair[0]), *marks(pair[1])}) for pair in found}
    left_out = {step: why for step, why in left_out.items() if why and step > warm_up}
    counted = [p for p in found if p[1]["step"] > warm_up and p[1]["step"] not in left_out]
    differing = [b["step"] for a, b in found if a["samples"] != b["samples"]]
    result: dict[str, Any] = {
        "pairs": len(counted),
        "left_out": left_out,
        "same_samples": not differing,
        "first_difference": min(differing, default=None),
    }
    every = [pair for pair in found if pair[1]["step"] > warm_up]
    for name, seconds in MEASURES.items():
        if len(every) >= 2:
            result.setdefault("every_pair", {})[name] = speed_up(_values(every, seconds))
        if len(counted) >= 2:
            result[name] = speed_up(_values(counted, seconds))
            result[name]["thirds"] = _thirds(_values(counted, seconds))
    return result


def _values(found: Sequence[Pair], seconds: Callable[[Turn], float]) -> list[tuple[float, float]]:
    return [(seconds(a), seconds(b)) for a, b in found]


def _thirds(values: Sequence[tuple[float, float]]) -> list[float]:
    """Return the ratio of the summed seconds in each third of the pairs."""
    cuts = [len(values) * third // 3 for third in range(4)]
    return [_total(values[i:j]) for i, j in pairwise(cuts) if j > i]
