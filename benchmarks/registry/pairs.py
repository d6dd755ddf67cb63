"""Arms that took turns, RL step by RL step (`benchmarks/e2e/run.py`).

`comparison` declares the table and the figures of one result: call it once per file of
`results/e2e/pairs`.
"""

from __future__ import annotations

import statistics
from typing import Any

from registry.core import Doc, Rows, figures, percent, table

MEASURES = ("end_to_end", "rollout", "rollout_per_token")


def interval(found: Doc, of: str = "median", form: str = "{:.2f}") -> str:
    """Return a speed-up with its interval, such as "1.42x (1.39 to 1.46)"."""
    value, low, high = (form.format(found[key]) for key in (of, f"{of}_low", f"{of}_high"))
    return f"{value}x ({low} to {high})"


def speed_ups(d: Doc) -> Rows:
    """One row per arm: paired ratios against the reference, with 95% intervals."""
    arms = d["scenario"]["arms"]
    rows = [[f"against {arms[d['scenario']['reference']]['label']}", "end to end", "rollout"]]
    rows[0] += ["rollout, all seconds", "pairs", "marked", "rollout without them", "samples"]
    for arm, found in d["speed_up"].items():
        every, marked = found["every_pair"], len(found["left_out"])
        cells = [interval(every["end_to_end"]), interval(every["rollout"])]
        cells += [interval(every["rollout"], "total"), str(found["pairs"] + marked), str(marked)]
        cells.append(interval(found["rollout"]) if "rollout" in found else "")
        other = f"differ from RL step {found['first_difference']} on"
        cells.append("the same" if found["same_samples"] else other)
        rows.append([arms[arm]["label"], *cells])
    return rows


def waiting_cores(d: Doc) -> float:
    """Return how many cores a waiting arm kept busy, in the median."""
    return statistics.median(
        used_s / turn["turn_s"] for turn in d["turns"] for used_s in turn["waiting_cpu_s"].values()
    )


def drift(d: Doc, arm: str) -> float:
    """Return how many times as long an arm's slowest RL step took per token as its fastest."""
    counted = [t for t in d["turns"] if t["arm"] == arm and t["step"] > d["scenario"]["warm_up"]]
    seconds = [t["rollout_s"] / t["output_tokens"] for t in counted]
    return max(seconds) / min(seconds)


def memory_gib(d: Doc) -> float:
    return max(size for group in d["groups"] for size in group.get("memory_gib", {}).values())


def half_width(found: Doc) -> float:
    return (found["median_high"] - found["median_low"]) / 2


def comparison(name: str, file: str) -> None:
    """Declare the table `name` and the figures `name.*` of one result file."""

    def of(arm: str, measure: str) -> Any:
        return lambda d: interval(d["speed_up"][arm][measure], form="{:.3f}")

    table(name, file)(speed_ups)
    figures(
        name,
        file,
        {
            "steps": lambda d: str(d["scenario"]["steps"]),
            "waiting_cores": lambda d: f"{waiting_cores(d):.2f}",
            "drift": lambda d: f"{drift(d, d['scenario']['reference']):.2f}x",
            "memory": lambda d: f"{memory_gib(d):.1f}",
            "half_width": lambda d: percent(
                max(half_width(each["end_to_end"]) for each in d["speed_up"].values())
            ),
        },
    )
