"""The training loop: its update, its rollout stage, an RL run, rewards, the timeline."""

from __future__ import annotations

import math
import statistics
from typing import Any

from registry.core import Doc, Rows, count, figures, percent, several, spread, table

Record = dict[str, Any]

figures(
    "learner",
    "learner",
    {
        "capture": lambda d: spread(d["capture_against_tlt"]),
        "samples": lambda d: count(d["num_samples"]),
        "rounds": lambda d: str(len(d["seconds"]["tlt"])),
    },
)


@table("learner_memory", "learner_memory")
def learner_memory(d: Doc) -> Rows:
    rows = [["case", "ranks", "tokens of a row", "tracker", "formula", "measured"]]
    for name, case in d["cases"].items():
        settings, tracked = case["settings"], case["tracked_bytes"]
        measured = case.get("measured_bytes")
        rows.append(
            [
                name.replace("_", " "),
                str(settings["num_ranks"]),
                count(settings["row_tokens"]),
                f"{tracked / 2**30:.2f} GiB",
                f"{case['formula_bytes'] / tracked - 1:+.1%}",
                f"{measured / tracked - 1:+.1%}" if measured else "",
            ]
        )
    return rows


STAGES = {
    "rollout": "rollout",
    "update": "update",
    "eval": "evaluation",
    "sync": "weight sync",
    "checkpoint": "checkpoint (stall)",
    "reward_wait": "waiting for rewards",
}


def steps(d: Doc) -> list[Record]:
    """The records of RL steps; step 0 is an evaluation before the first."""
    return [record for record in d["lines"] if record["step"] > 0]


@table("train.stages", "train/metrics", "train/summary")
def stages(d: Doc, _: Doc) -> Rows:
    records = steps(d)
    total_s = sum(record["time/step_s"] for record in records)
    rows = [["stage", "median seconds", "share of the run"]]
    for key, label in STAGES.items():
        spent = [record[f"time/{key}_s"] for record in records]
        share = sum(spent) / total_s
        taken = [s for s in spent if s > 0] or [0.0]
        often = f" ({len(taken)} of {len(spent)} RL steps)" if key == "eval" else ""
        cell = percent(share) if share >= 0.01 else "<1%"
        rows.append([label + often, f"{statistics.median(taken):.1f}", cell])
    return rows


def slope(d: Doc) -> tuple[float, float]:
    """How much the reward rises in an RL step, and the standard error of that."""
    y = [record["reward/mean"] for record in steps(d)]
    x = range(1, len(y) + 1)
    fit = statistics.linear_regression(x, y)
    middle = statistics.fmean(x)
    squares = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(squares / (len(y) - 2) / sum((a - middle) ** 2 for a in x))
    return fit.slope, error


figures(
    "train",
    "train/summary",
    {
        "steps": lambda d: str(d["num_steps"]),
        "minutes": lambda d: f"{d['total']['time/step_s'] / 60:.0f} minutes",
        "reward.first": lambda d: f"{d['reward']['first_fifth']:.2f}",
        "reward.last": lambda d: f"{d['reward']['last_fifth']:.2f}",
        "held_out.first": lambda d: f"{d['eval_reward']['first']:.2f}",
        "held_out.last": lambda d: f"{d['eval_reward']['last']:.2f}",
        "gap": lambda d: f"{d['median']['learner/gap_mean']:.3f}",
        "engine_restarts": lambda d: str(d["total"]["rollout/engine_restarts"]),
    },
)


def held_out(d: Doc) -> list[str]:
    return [f"{r['eval/reward_mean']:.3f}" for r in d["lines"] if "eval/reward_mean" in r]


def tail(d: Doc) -> str:
    """The 99th percentile of response lengths over their median; median over the RL steps."""
    found = [r["response/p99_tokens"] / r["response/median_tokens"] for r in steps(d)]
    return f"{statistics.median(found):.1f}x"


figures(
    "train.run",
    "train/metrics",
    {
        "tail": tail,
        "slope": lambda d: f"{slope(d)[0]:.4f}",
        "slope_error": lambda d: f"{slope(d)[1]:.4f}",
        "held_out": lambda d: ", ".join(held_out(d)),
        "signal": lambda d: percent(
            statistics.fmean(r["reward/groups_with_signal_share"] for r in steps(d))
        ),
    },
)

figures(
    "quality",
    "quality",
    {
        "seeds": lambda d: str(d["seeds"]),
        "steps": lambda d: str(d["steps"]),
        "off": lambda d: f"{statistics.fmean(d['mean_reward']['off']):.3f}",
        "tlt": lambda d: f"{statistics.fmean(d['mean_reward']['tlt']):.3f}",
        "difference": lambda d: f"{d['mean_reward']['difference']:.3f}",
        "interval": lambda d: f"{d['mean_reward']['low']:.3f} to {d['mean_reward']['high']:.3f}",
        "p": lambda d: f"{d['mean_reward']['p']:.2f}",
        "verdict": lambda d: (
            "differ significantly"
            if d["mean_reward"]["p"] < 0.05
            else "do not differ significantly"
        ),
        "held_out.off": lambda d: f"{statistics.fmean(d['last_held_out']['off']):.3f}",
        "held_out.tlt": lambda d: f"{statistics.fmean(d['last_held_out']['tlt']):.3f}",
        "held_out.p": lambda d: f"{d['last_held_out']['p']:.2f}",
        "held_out.before": lambda d: (
            f"{statistics.fmean(run['held_out'][0] for run in d['runs']['off']):.3f}"
        ),
        "accepted": lambda d: f"{d['acceptance_length']:.1f}",
    },
)

figures(
    "timeline",
    "timeline",
    {
        "share": lambda d: f"{d['share']:.2%}",
        "noting": lambda d: f"{d['noting_us']:.1f} µs",
        "step": lambda d: f"{d['other_ms']['with'] - d['other_ms']['without']:.1f} ms",
        "pairs": lambda d: several(
            [d["with_over_without"]["low"], d["with_over_without"]["high"]], unit=""
        ),
    },
)


def differs(arm: Doc) -> str:
    """Where an arm of the same run differs from the run without TLT."""
    against = arm.get("against_off")
    if against is None:
        return ""
    step = against["first_differing_step"]
    if step is None:
        return "nowhere" if against["same_weights"] else "final weights"
    return f"from RL step {step}"


@table("same_run", "same_run")
def same_run(d: Doc) -> Rows:
    rows = [["run", "drafts", "accepted tokens", "drafter swaps", "differs from the first"]]
    for arm in d["arms"].values():
        counts = [f"{arm[key]:,.0f}" for key in ("drafts", "accepted_tokens", "published")]
        rows.append([arm["text"], *counts, differs(arm)])
    return rows


figures(
    "same_run",
    "same_run",
    {
        "steps": lambda d: str(d["steps"]),
        "prompts": lambda d: str(d["prompts_per_step"]),
        "samples": lambda d: f"{d['arms']['tlt-2']['against_off']['samples']:,}",
        "tokens": lambda d: f"{d['arms']['tlt-2']['against_off']['tokens']:,}",
        "metrics": lambda d: f"{d['arms']['tlt-2']['against_off']['metrics']:,}",
        "accepted": lambda d: f"{d['arms']['tlt-2']['accepted_tokens']:,.0f}",
        "published": lambda d: f"{d['arms']['tlt-2']['published']:.0f}",
        "verdict": lambda d: (
            "are equal in every bit"
            if all(differs(arm) in ("", "nowhere") for arm in d["arms"].values())
            else "differ"
        ),
    },
)
