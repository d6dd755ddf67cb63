"""What simulated runs say: numbers, and an answer in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

Record = dict[str, float]


def figures(records: Sequence[Record]) -> dict[str, float]:
    """A mode in a few numbers, over all its steps but the first, which learns."""
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
    """Of every mode over the first."""
    base = next(iter(found.values()))
    return {
        name: {
            "end_to_end": base["step_s"] / of["step_s"],
            "rollout": base["rollout_s"] / of["rollout_s"],
        }
        for name, of in found.items()
    }


def in_words(found: Mapping[str, Mapping[str, float]]) -> str:
    """Whether it is worth it, and what stands in the way."""
    names = list(found)
    base, best = found[names[0]], found[names[-1]]
    gained = base["step_s"] / best["step_s"]
    rollout = base["rollout_s"] / best["rollout_s"]
    share = base["rollout_share"]
    most = 1 / max(0.01, 1 - share)
    words = [
        f"{names[-1]} would run {gained:.2f}x as fast as {names[0]}: rollouts, {share:.0%} of a "
        f"step, {rollout:.2f}x."
    ]
    if share < 0.5:
        words.append(
            f"Rollouts are a small part: faster ones could bring {most:.1f}x at most. Look at the "
            "learner."
        )
    elif base["idle_share"] < 0.1:
        words.append("Engines are hardly ever idle: there is little tail to tame.")
    elif rollout < 1.2:
        words.append("Speculation gains little here: batches are large, or drafts rarely accepted.")
    else:
        words.append(
            f"Engines are idle for {base['idle_share']:.0%} of the rollout; with instant rollouts "
            f"it would be {most:.1f}x."
        )
    return " ".join(words)
