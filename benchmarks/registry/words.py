"""Word problems: lengths of the responses, and what is accepted (`words.sh`)."""

from __future__ import annotations

from typing import Any

from registry.core import Doc, count, figures

FILE = "words/rollout"


def first(d: Doc) -> dict[str, Any]:
    """The first run: in float32 every run has the same responses."""
    found: dict[str, Any] = d["runs"][0]
    return found


def accepted(d: Doc, mode: str) -> str:
    row = next(row for row in d["summary"] if row["mode"] == mode)
    return f"{row['acceptance_length']['median']:.2f}"


figures(
    "words",
    FILE,
    {
        "requests": lambda d: count(len(first(d)["lengths"])),
        "median_tokens": lambda d: count(first(d)["median_tokens"]),
        "p99_tokens": lambda d: count(first(d)["p99_tokens"]),
        "tail": lambda d: f"{first(d)['p99_tokens'] / first(d)['median_tokens']:.1f}x",
        "accepted.ngram": lambda d: accepted(d, "ngram:3"),
        "accepted.eagle3": lambda d: accepted(d, "eagle3:3"),
        "reward": lambda d: f"{first(d)['mean_reward']:.2f}",
    },
)
