"""Arms that took turns, RL step by RL step (`benchmarks/e2e/run.py`)."""

from __future__ import annotations

from typing import Any

from registry.core import Doc


def interval(found: Doc, of: str = "median") -> str:
    """Return a speed-up with its interval, such as "1.42x (1.39 to 1.46)"."""
    value, low, high = (f"{found[key]:.2f}" for key in (of, f"{of}_low", f"{of}_high"))
    return f"{value}x ({low} to {high})"


def same_policy(d: Doc, arm: str) -> str:
    """Say whether an arm's run left the policy of the reference beside it; empty if not known."""
    reference = d["scenario"]["reference"]
    for group in d["groups"]:
        left = group.get("policy", {})
        if arm in left:
            return "the same" if left[arm] == left[reference] else "another"
    return ""


def turns(d: Doc, arm: str) -> list[dict[str, Any]]:
    """Turns of an arm after the warm-up; of the reference, those beside every other arm."""
    return [t for t in d["turns"] if t["arm"] == arm and t["step"] > d["scenario"]["warm_up"]]


def drift(d: Doc, arm: str) -> float:
    """Return how many times as long an arm's slowest RL step took per token as its fastest."""
    seconds = [t["rollout_s"] / t["output_tokens"] for t in turns(d, arm)]
    return max(seconds) / min(seconds)
