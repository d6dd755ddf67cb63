"""Arms that took turns, RL step by RL step (`benchmarks/e2e/run.py`).

`comparison` declares the table and the figures of one result: call it once per file of
`results/e2e/pairs`.
"""

from __future__ import annotations

from typing import Any

from registry.core import Doc, Rows, table


def interval(found: Doc, of: str = "median") -> str:
    """Return a speed-up with its interval, such as "1.42x (1.39 to 1.46)"."""
    value, low, high = (f"{found[key]:.2f}" for key in (of, f"{of}_low", f"{of}_high"))
    return f"{value}x ({low} to {high})"


def speed_ups(d: Doc) -> Rows:
    """One row per arm: paired ratios against the reference, with 95% intervals."""
    arms = d["scenario"]["arms"]
    rows = [[f"against {arms[d['scenario']['reference']]['label']}", "end to end", "rollout"]]
    rows[0] += ["pairs", "marked", "rollout without them", "samples", "policy"]
    for arm, found in d["speed_up"].items():
        every, marked = found["every_pair"], len(found["left_out"])
        cells = [interval(every["end_to_end"]), interval(every["rollout"])]
        cells += [str(found["pairs"] + marked), str(marked)]
        cells.append(interval(found["rollout"]) if "rollout" in found else "")
        other = f"differ from RL step {found['first_difference']} on"
        cells.append("the same" if found["same_samples"] else other)
        cells.append(same_policy(d, arm))
        rows.append([arms[arm]["label"], *cells])
    return rows


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


def comparison(name: str, file: str) -> None:
    """Declare the table of one result file."""
    table(name, file)(speed_ups)
