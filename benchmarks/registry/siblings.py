"""What siblings teach an n-gram drafter (`benchmarks/siblings.py`)."""

from __future__ import annotations

from collections.abc import Callable

from registry.core import Doc, Rows, count, figures, table

FILE = "siblings"
PUBLISHED = {"0": "1.70", "1": "2.04", "5": "2.32", "15": "2.53"}
"""Accepted lengths of Seer (arXiv 2511.14617), with as many siblings."""
HAND_OVERS = {
    "apart": "nothing",
    "ended": "responses that have ended",
    "running": "and running ones",
}


def step(found: Doc) -> str:
    return f"{found['tokens_per_step']:.2f}"


@table("siblings.known", FILE)
def known(d: Doc) -> Rows:
    lengths = list(d["drafted"])
    steps = (f"tokens per engine step, K = {k}" for k in lengths)
    rows = [
        ["siblings known", *steps, f"accepted per draft, K = {lengths[-1]}", "published (Seer)"]
    ]
    for name in d["drafted"][lengths[-1]]["known"]:
        of = [d["drafted"][k]["known"][name] for k in lengths]
        label = name if name in PUBLISHED else "15 responses to other prompts"
        accepted = f"{of[-1]['accepted_per_draft']:.2f}"
        rows.append([label, *map(step, of), accepted, PUBLISHED.get(name, "")])
    return rows


@table("siblings.spread", FILE)
def spread(d: Doc) -> Rows:
    longest = list(d["drafted"])[-1]
    found = d["drafted"][longest]["spread"]
    rows = [["engines of a group", *HAND_OVERS.values()]]
    for engines, of in found.items():
        rows.append([engines, *(step(of[how]) if how in of else "" for how in HAND_OVERS)])
    return rows


def at(kind: str, *names: str) -> Callable[[Doc], str]:
    """Return a figure of the longest drafts."""

    def text(d: Doc) -> str:
        of = list(d["drafted"].values())[-1][kind]
        for name in names:
            of = of[name]
        return step(of)

    return text


figures(
    "siblings",
    FILE,
    {
        "prompts": lambda d: str(d["options"]["prompts"]),
        "responses": lambda d: count(d["responses"]),
        "tokens": lambda d: count(d["tokens"]),
        "drafted": lambda d: list(d["drafted"])[-1],
        "alone": at("known", "0"),
        "five": at("known", "5"),
        "all": at("known", "15"),
        "others": at("known", "other prompts"),
        "together": at("spread", "1", "apart"),
        "apart": at("spread", "4", "apart"),
        "ended": at("spread", "4", "ended"),
        "running": at("spread", "4", "running"),
    },
)
