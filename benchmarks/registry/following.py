"""A run that begins without a drafter, and how its drafters follow the policy (`following.py`)."""

from __future__ import annotations

import math
import statistics
from typing import Any

from registry.core import Doc, Rows, figures, table

FILE = "e2e/pairs/from_nothing"


def turns(d: Doc, arm: str = "nothing") -> list[dict[str, Any]]:
    return [turn for turn in d["turns"] if turn["arm"] == arm]


def thirds(d: Doc, arm: str = "nothing") -> list[list[dict[str, Any]]]:
    """The RL steps that count, in three parts."""
    marked, warm_up = d["speed_up"]["nothing"]["left_out"], d["scenario"]["warm_up"]
    counted = [t for t in turns(d, arm) if t["step"] > warm_up and str(t["step"]) not in marked]
    cuts = [len(counted) * third // 3 for third in range(4)]
    return [counted[cuts[i] : cuts[i + 1]] for i in range(3)]


def mean(part: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(turn["metrics"].get(name, 0.0) for turn in part)


def used_s(d: Doc, until: float = float("inf")) -> float:
    """Idle worker seconds that the run trained on, until an RL step."""
    used = (t["metrics"].get("harvest/used_s", 0.0) for t in turns(d) if t["step"] <= until)
    return float(sum(used))


@table("from_nothing.thirds", FILE)
def by_third(d: Doc) -> Rows:
    rows = [
        [
            *("RL steps", "rollout against n-grams", "per token", "end to end"),
            *("tokens per draft, n-grams", "TLT", "idle time trained on, so far"),
        ]
    ]
    found, names = d["speed_up"]["nothing"], ("rollout", "rollout_per_token", "end_to_end")
    for third, (own, other) in enumerate(zip(thirds(d), thirds(d, "ngram"), strict=True)):
        steps = f"{own[0]['step']} to {own[-1]['step']}"
        ratios = [f"{found[name]['thirds'][third]:.2f}x" for name in names]
        lengths = [f"{mean(part, 'rollout/acceptance_length'):.2f}" for part in (other, own)]
        rows.append([steps, *ratios, *lengths, f"{used_s(d, own[-1]['step']):.0f} s"])
    return rows


figures(
    "from_nothing",
    FILE,
    {
        "all_steps": lambda d: str(max(turn["step"] for turn in d["turns"])),
        "used_s": lambda d: f"{used_s(d):.0f} s",
    },
)


def against_frozen(found: Doc) -> str:
    low, high = found["to_frozen_interval"]
    return f"{found['to_frozen']:.2f}x ({low:.2f} to {high:.2f})"


def rate(length: float, draft_length: int) -> float:
    """Return the factor whose first powers add up to the accepted tokens of a draft."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if 1 + sum(middle**place for place in range(1, draft_length + 1)) < length:
            low = middle
        else:
            high = middle
    return low


def drift(d: Doc) -> float:
    """Return how much the power of the frozen drafter's acceptance rate grows per update."""
    lengths = [row["drafters"]["frozen"]["length"] for row in d["policies"]]
    rates = [math.log(rate(length, d["draft_length"])) for length in lengths]
    steps = [row["step"] for row in d["policies"]]
    return statistics.linear_regression(steps, [each / rates[0] for each in rates]).slope


figures(
    "following",
    "following",
    {
        "last": lambda d: against_frozen(d["policies"][-1]["drafters"]["published"]),
        "steps": lambda d: str(d["policies"][-1]["step"]),
        "drift": lambda d: f"{drift(d):.4f}",
    },
)
