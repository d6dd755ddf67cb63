"""Whole RL runs in several ways that take turns: what each part of TLT adds."""

from __future__ import annotations

import statistics

from registry.core import Doc, Rows, count, figures, ms, percent, table
from registry.pairs import comparison, interval, turns

SCENARIOS = {"words": "natural lengths", "tail": "heavy tail"}
"""Scenarios in which all arms are compared with no speculation, and their titles."""

for each in (*SCENARIOS, "identical"):
    comparison(f"e2e.{each}", f"e2e/pairs/{each}")


def labels(*docs: Doc) -> dict[str, str]:
    """Names of the arms that were measured, in the order of the scenarios."""
    return {arm: d["scenario"]["arms"][arm]["label"] for d in docs for arm in d["speed_up"]}


@table("e2e", *(f"e2e/pairs/{name}" for name in SCENARIOS))
def parts(*docs: Doc) -> Rows:
    """One row per arm: how many times as fast as no speculation, scenario by scenario."""
    head = [f"{title}, {of}" for title in SCENARIOS.values() for of in ("end to end", "rollout")]
    rows = [["against no speculation", *head]]
    for arm, label in labels(*docs).items():
        cells = [
            interval(d["speed_up"][arm]["every_pair"][measure]) if arm in d["speed_up"] else ""
            for d in docs
            for measure in ("end_to_end", "rollout")
        ]
        rows.append([label, *cells])
    return rows


def mean(d: Doc, arm: str, metric: str) -> float:
    return statistics.fmean(t["metrics"].get(metric, 0.0) for t in turns(d, arm))


def rollout_share(d: Doc) -> float:
    found = turns(d, "off")
    return sum(t["rollout_s"] for t in found) / sum(t["end_to_end_s"] for t in found)


def of_scenario(name: str) -> None:
    """Declare figures of one scenario."""
    arm = "tlt"
    figures(
        f"e2e.{name}",
        f"e2e/pairs/{name}",
        {
            "rollout_share": lambda d: percent(rollout_share(d)),
            "median_tokens": lambda d: count(
                statistics.median(n for t in turns(d, "off") for n in t["lengths"])
            ),
            "longest_tokens": lambda d: count(
                max(n for t in turns(d, "off") for n in t["lengths"])
            ),
            "end_to_end": lambda d: interval(d["speed_up"][arm]["every_pair"]["end_to_end"]),
            "rollout": lambda d: interval(d["speed_up"][arm]["every_pair"]["rollout"]),
            "accepted": lambda d: f"{mean(d, arm, 'rollout/acceptance_length'):.2f}",
            "harvest.idle_s": lambda d: f"{mean(d, arm, 'harvest/idle_s'):.1f} s",
            "harvest.stop_max": lambda d: ms(
                max(t["metrics"].get("harvest/stop_max_s", 0.0) for t in turns(d, arm))
            ),
        },
    )


of_scenario("words")
of_scenario("tail")
