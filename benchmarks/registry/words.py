"""Word problems: lengths of the responses, and what is accepted (`words.sh`)."""

from __future__ import annotations

from registry.core import Doc, figures

FILE = "words/rollout"


def accepted(d: Doc, mode: str) -> str:
    row = next(row for row in d["summary"] if row["mode"] == mode)
    return f"{row['acceptance_length']['median']:.2f}"


figures(
    "words",
    FILE,
    {
        "accepted.ngram": lambda d: accepted(d, "ngram:3"),
        "accepted.eagle3": lambda d: accepted(d, "eagle3:3"),
    },
)
