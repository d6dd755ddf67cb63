"""The training loop: its update, its rollout stage, an RL run, rewards, the timeline."""

from __future__ import annotations

import statistics

from registry.core import Doc, Rows, count, figures, percent, table


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


@table("recipes", "recipes")
def recipes(d: Doc) -> Rows:
    rows = [
        [
            "recipe",
            "RL steps",
            "reward, first fifth",
            "last fifth",
            "held-out, first",
            "last",
            "idle",
            "extra prompts",
            "minutes",
        ]
    ]
    for recipe in d["recipes"].values():
        extra = recipe.get("rollout/replacement_share")
        rows.append(
            [
                recipe["label"],
                str(len(recipe["rewards"])),
                f"{recipe['first']:.2f}",
                f"{recipe['last']:.2f}",
                f"{recipe['held_out'][0]:.2f}",
                f"{recipe['held_out'][-1]:.2f}",
                percent(recipe["rollout/idle_share"]),
                percent(extra) if extra else "",
                f"{recipe['minutes']:.1f}",
            ]
        )
    return rows


figures(
    "train",
    "train/summary",
    {
        "steps": lambda d: str(d["num_steps"]),
        "minutes": lambda d: f"{d['total']['time/step_s'] / 60:.0f} minutes",
        "held_out.first": lambda d: f"{d['eval_reward']['first']:.2f}",
        "held_out.last": lambda d: f"{d['eval_reward']['last']:.2f}",
    },
)


figures(
    "quality",
    "quality",
    {
        "seeds": lambda d: str(d["seeds"]),
        "held_out.before": lambda d: held_out(d, 0),
        "held_out.off": lambda d: held_out(d, -1),
    },
)


def held_out(d: Doc, place: int) -> str:
    return f"{statistics.fmean(run['held_out'][place] for run in d['runs']['off']):.3f}"


figures(
    "timeline",
    "timeline",
    {
        "share": lambda d: f"{d['share']:.2%}",
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
        "samples": lambda d: f"{d['arms']['tlt-2']['against_off']['samples']:,}",
        "verdict": lambda d: (
            "are equal in every bit"
            if all(differs(arm) in ("", "nowhere") for arm in d["arms"].values())
            else "differ"
        ),
    },
)
