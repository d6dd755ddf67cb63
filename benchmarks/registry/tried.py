"""Ideas that were built, measured and removed; docs/development.md tells of each."""

from __future__ import annotations

from registry.core import Doc, figures, limits
from registry.pairs import interval

FILE = "tried"


def rollout(d: Doc, result: str, arm: str) -> str:
    return interval(d["results"][result]["arms"][arm]["rollout"])


def modelled(d: Doc, *gpus: int) -> str:
    """Return the range of modelled speed-ups of look-ahead on so many GPUs."""
    rows = d["results"]["simulated_ahead"]["rows"]
    return limits([row["speed_up"] for row in rows if row["gpus"] in gpus]) + "x"


def forecast(d: Doc, kind: str) -> str:
    """Return the range of modelled speed-ups of longest-first where requests wait for slots."""
    rows = [row["speed_up"] for row in d["results"]["dispatch"]["rows"] if row["requests_wait"]]
    return limits([row[kind] for row in rows if kind in row]) + "x"


def chosen(d: Doc) -> str:
    """Return the range of tokens per draft with counted levels, against the best fixed level."""
    found = []
    for row in d["results"]["draft_noise"]["rows"]:
        lengths = row["tokens_per_draft"]
        best = max(value for name, value in lengths.items() if name != "chosen")
        found.append(lengths["chosen"] / best)
    return limits(found)


def per_request(d: Doc, machine: str) -> str:
    """Return the range of speed-ups of a length per request, by batch size."""
    rows = d["results"]["per_request"]["rows"]
    return limits([row["gain"] for row in rows if row["machine"] == machine]) + "x"


figures(
    FILE,
    FILE,
    {
        "per_request.cpu": lambda d: per_request(d, "these cores"),
        "per_request.gpu": lambda d: per_request(d, "H100, 7B"),
        "ahead": lambda d: rollout(d, "beyond", "ahead"),
        "ahead.few": lambda d: modelled(d, 8),
        "shared": lambda d: rollout(d, "beyond", "shared"),
        "mixed": lambda d: rollout(d, "beyond", "mixed"),
        "longest.new": lambda d: rollout(d, "queue", "longest"),
        "longest.known": lambda d: forecast(d, "known"),
        "longest.wrong": lambda d: forecast(d, "exchanged"),
        "noise.chosen": chosen,
    },
)
