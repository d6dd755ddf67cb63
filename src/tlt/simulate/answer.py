"""The result of simulated runs, as numbers and in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

Record = dict[str, float]

LABELS = {
    "off": "no speculation",
    "static": "fixed arm",
    "ngram": "TLT with n-grams only",
    "frozen": "TLT without harvest",
    "tlt": "TLT",
}
"""Names of modes in tables, pictures and sentences, where they differ from those in files."""


def figures(records: Sequence[Record]) -> dict[str, float]:
    """Return a mode's figures over all RL steps but the first, in which the strategy learns."""
    later = records[1:] or records
    step_s = sum(r["time/step_s"] for r in later)
    rollout_s = sum(r["time/rollout_s"] for r in later)
    found = {
        "step_s": step_s / len(later),
        "rollout_s": rollout_s / len(later),
        "update_s": fmean(r["time/update_s"] for r in later),
        "rollout_share": rollout_s / step_s,
        "idle_share": fmean(r["rollout/idle_share"] for r in later),
        "draft_length": later[-1]["harvest/held_out_length"],
    }
    if "harvest/used_s" in later[-1]:
        coverable_s = sum(r["harvest/coverable_s"] for r in later)
        found["used_share"] = sum(r["harvest/used_s"] for r in later) / max(1e-9, coverable_s)
        found["published"] = sum(r["harvest/published"] for r in later)
    return found


def speed_ups(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the speed-up of every mode over the first mode."""
    base = next(iter(found.values()))
    return {
        name: {
            "end_to_end": base["step_s"] / of["step_s"],
            "rollout": base["rollout_s"] / of["rollout_s"],
        }
        for name, of in found.items()
    }


def contributions(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return how many times as fast TLT is as the fixed arm, and as itself without harvest."""
    without = "frozen" if "frozen" in found else "ngram"
    others = {"over_fixed_arm": "static", "harvest": without}
    return {
        name: {
            "end_to_end": found[other]["step_s"] / found["tlt"]["step_s"],
            "rollout": found[other]["rollout_s"] / found["tlt"]["rollout_s"],
        }
        for name, other in others.items()
        if other in found and "tlt" in found
    }


def in_words(
    found: Mapping[str, Mapping[str, float]],
    fixed_arm: str = "the fixed arm",
    from_nothing: bool = False,
) -> str:
    """Return whether the last mode is worth it, what brings it, and what limits it.

    `from_nothing` says that the run begins without a drafter.
    """
    names = [LABELS.get(name, name) for name in found]
    base, *_ = found.values()
    *_, best = found.values()
    gained = base["step_s"] / best["step_s"]
    rollout = base["rollout_s"] / best["rollout_s"]
    share = base["rollout_share"]
    most = 1 / max(0.01, 1 - share)
    words = [
        f"Modelled: {names[-1]} would run {gained:.2f}x as fast as {names[0]}. Rollouts, "
        f"{share:.0%} of an RL step, would run {rollout:.2f}x as fast."
    ]
    of = contributions(found)
    if "over_fixed_arm" in of:
        words.append(f"That is {of['over_fixed_arm']['end_to_end']:.2f}x as fast as {fixed_arm}.")
    if "harvest" in of:
        words.append(f"Harvest's part of that is {of['harvest']['end_to_end']:.2f}x.")
    elif from_nothing and "tlt" in found:
        words.append("All of it is harvest's part: the run begins without a drafter.")
    if share < 0.5:
        words.append(
            f"Rollouts are a small part: instant rollouts would bring {most:.1f}x. Look at the "
            "learner."
        )
    elif base["idle_share"] < 0.1:
        words.append("Engines are hardly ever idle: the tail is short.")
    elif rollout < 1.2:
        words.append("Speculation gains little: batches are large, or drafts are rarely accepted.")
    else:
        words.append(
            f"Engines are idle for {base['idle_share']:.0%} of the rollout. Instant rollouts would "
            f"bring {most:.1f}x."
        )
    return " ".join(words)
