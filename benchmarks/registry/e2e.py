"""Whole RL runs in several ways that take turns: what each part of TLT adds."""

from __future__ import annotations

import statistics

from registry.core import Doc, Rows, count, figures, percent, table
from registry.pairs import drift, interval, same_policy, turns

ALL = ("words_again", "words", "tail", "tools", "equal", "from_nothing", "identical")
"""Results of all scenarios."""

SEEDS = {"0": "words", "1": "words-seed1", "2": "words-seed2"}
"""Results of the natural lengths, by seed."""


@table("e2e.all", *(f"e2e/pairs/{name}" for name in ALL))
def every(*docs: Doc) -> Rows:
    """One row per scenario and arm: its speed-ups, and whether it has the reference's samples."""
    rows = [["scenario", "arm", "end to end", "rollout", "pairs", "marked", "samples"]]
    for name, d in zip(ALL, docs, strict=True):
        arms = d["scenario"]["arms"]
        for arm, found in d["speed_up"].items():
            cells = [interval(found["every_pair"][of]) for of in ("end_to_end", "rollout")]
            marked = len(found["left_out"])
            cells += [str(found["pairs"] + marked), str(marked)]
            same = "the same" if found["same_samples"] else "others"
            rows.append([f"`{name}`", arms[arm]["label"], *cells, same])
    return rows


@table("e2e.seeds", *(f"e2e/pairs/{name}" for name in SEEDS.values()))
def seeds(*docs: Doc) -> Rows:
    """One row per seed: rewards with and without TLT, and whether samples and policy are equal."""
    rows = [["seed", "RL steps", "samples", "mean reward without TLT", "with TLT"]]
    rows[0] += ["the samples are", "the policy is"]
    for seed, d in zip(SEEDS, docs, strict=True):
        of = {arm: [t for t in d["turns"] if t["arm"] == arm] for arm in ("off", "tlt")}
        samples = sum(len(t["lengths"]) for t in of["tlt"])
        group = of["tlt"][0]["group"]
        rewards = [
            statistics.fmean(t["metrics"]["reward/mean"] for t in found if t["group"] == group)
            for found in of.values()
        ]
        same = "the same" if d["speed_up"]["tlt"]["same_samples"] else "others"
        cells = [str(len(of["tlt"])), count(samples), *(f"{value:.6f}" for value in rewards)]
        rows.append([seed, *cells, same, same_policy(d, "tlt")])
    return rows


def mean(d: Doc, arm: str, metric: str) -> float:
    return statistics.fmean(t["metrics"].get(metric, 0.0) for t in turns(d, arm))


def rollout_share(d: Doc) -> float:
    found = turns(d, "off")
    return sum(t["rollout_s"] for t in found) / sum(t["end_to_end_s"] for t in found)


def lengths(d: Doc) -> list[int]:
    return [length for turn in turns(d, "off") for length in turn["lengths"]]


figures(
    "e2e.words",
    "e2e/pairs/words",
    {
        "rollout_share": lambda d: percent(rollout_share(d)),
        "harvest.idle_s": lambda d: f"{mean(d, 'tlt', 'harvest/idle_s'):.1f} s",
    },
)
figures(
    "e2e.tools",
    "e2e/pairs/tools",
    {
        "wait_s": lambda d: f"{mean(d, 'off', 'tools/wait_s_mean'):.1f} s",
        "accepted": lambda d: f"{mean(d, 'ngram', 'rollout/acceptance_length'):.2f}",
    },
)
figures(
    "e2e.words_again",
    "e2e/pairs/words_again",
    {
        "rollout_share": lambda d: percent(rollout_share(d)),
        "end_to_end": lambda d: interval(d["speed_up"]["tlt"]["every_pair"]["end_to_end"]),
        "accepted": lambda d: f"{mean(d, 'tlt', 'rollout/acceptance_length'):.2f}",
    },
)
figures(
    "e2e.tail",
    "e2e/pairs/tail",
    {
        "drift": lambda d: f"{drift(d, 'off'):.2f}x",
        "median_tokens": lambda d: count(statistics.median(lengths(d))),
        "longest_tokens": lambda d: count(max(lengths(d))),
    },
)
