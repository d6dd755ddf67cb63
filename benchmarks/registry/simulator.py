"""The simulator against runs it has not seen, against published figures, and by size."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, limits, percent, table
from registry.pairs import interval

figures(
    "simulator",
    "simulator",
    {"runs": lambda d: str(len(d["runs"]))}
    | {
        f"{name}.{kind}": lambda d, name=name, kind=kind: percent(d[name][f"{kind}_error"])
        for name in ("rollout", "step")
        for kind in ("median", "worst")
    },
)

ARMS = {
    "ngram": "n-grams, adaptive",
    "fixed": "frozen drafter, 3 draft tokens",
    "frozen": "frozen drafter, adaptive",
    "tlt": "TLT",
}


@table("simulated_words", "simulated_words")
def gains(d: Doc) -> Rows:
    """One row per arm: the measured speed-up over no speculation beside the predicted one."""
    rows = [["against no speculation", "rollout, measured", "modelled"]]
    rows[0] += ["end to end, measured", "modelled"]
    for arm, row in d["arms"].items():
        cells = [ARMS[arm]]
        for measure in ("rollout", "end_to_end"):
            of = row[measure]
            cells += [interval(of["measured"]), f"{of['predicted']:.2f}x"]
        rows.append(cells)
    return rows


PAPER = "TLT paper"
SHOWN = {
    "rollout": ("rollout, speed-up", "{:.2f}"),
    "end_to_end": ("end to end, speed-up", "{:.2f}"),
    "rollout_s": ("rollout without speculation", "{:.0f} s"),
    "step_s": ("RL step without speculation", "{:.0f} s"),
}
"""Names of published figures, and how they are written."""


def off_by(d: Doc, model: str, gpus: int) -> str:
    found = [
        abs(row["off_by"])
        for row in d["rows"]
        if row["model"] == model and row["gpus_per_engine"] == gpus and row["run"] == PAPER
    ]
    return limits([100 * value for value in found], "{:.0f}") + "%"


def others(d: Doc) -> list[Doc]:
    return [row for row in d["rows"] if row["run"] != PAPER]


@table("published.runs", "published")
def published_runs(d: Doc) -> Rows:
    rows = [["run", "figure", "published", "modelled", "off by"]]
    for row in others(d):
        name, form = SHOWN[row["figure"]]
        seen = [form.format(row[key]) for key in ("published", "simulated")]
        rows.append([row["run"], name, *seen, f"{row['simulated'] / row['published'] - 1:+.0%}"])
    return rows


def others_off_by(d: Doc) -> str:
    found = [100 * row["off_by"] for row in others(d) if row["figure"] in ("rollout", "end_to_end")]
    return limits(found, "{:.0f}") + "%"


def speculative_step(d: Doc, key: str) -> str:
    """Return how many times as long as a plain engine step one with drafts takes."""
    rows = [row for row in others(d) if row["figure"] == "rollout"]
    return limits([row["acceptance_length"] / row[key] for row in rows], "{:.1f}") + "x"


figures(
    "published",
    "published",
    {
        "runs.step_published": lambda d: speculative_step(d, "published"),
        "runs.step_modelled": lambda d: speculative_step(d, "simulated"),
        "assumptions": lambda d: str(len(d["assumed"][PAPER])),
        "runs.off_by": others_off_by,
        "7b.one_gpu": lambda d: off_by(d, "qwen2.5-7b", 1),
        "7b.four_gpus": lambda d: off_by(d, "qwen2.5-7b", 4),
    },
)
