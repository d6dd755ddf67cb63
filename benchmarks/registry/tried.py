"""Ideas that were built, measured and removed; docs/development.md tells of each."""

from __future__ import annotations

from registry.core import Doc, count, figures, limits
from registry.pairs import interval

FILE = "tried"


def rollout(d: Doc, result: str, arm: str) -> str:
    return interval(d["results"][result]["arms"][arm]["rollout"])


def modelled(d: Doc, *gpus: int) -> str:
    """Return the range of modelled speed-ups of look-ahead on so many GPUs."""
    rows = d["results"]["simulated_ahead"]["rows"]
    return limits([row["speed_up"] for row in rows if row["gpus"] in gpus]) + "x"


def ahead_steps(d: Doc, lr: str) -> str:
    found = d["results"]["look_ahead"]["tokens_per_engine_step_by_lr"][lr]
    return limits(found, "{:.1f}")


def forecast(d: Doc, kind: str) -> str:
    """Return the range of modelled speed-ups of longest-first where requests wait for slots."""
    rows = [row["speed_up"] for row in d["results"]["dispatch"]["rows"] if row["requests_wait"]]
    return limits([row[kind] for row in rows if kind in row]) + "x"


def texts(d: Doc, where: str) -> str:
    return f"{d['results']['siblings']['tokens_per_engine_step'][where]:.2f}"


def chosen(d: Doc) -> str:
    """Return the range of tokens per draft with counted levels, against the best fixed level."""
    found = []
    for row in d["results"]["draft_noise"]["rows"]:
        lengths = row["tokens_per_draft"]
        best = max(value for name, value in lengths.items() if name != "chosen")
        found.append(lengths["chosen"] / best)
    return limits(found)


def noise(d: Doc, level: str) -> str:
    """Return the range of tokens per draft with a fixed level, against no noise."""
    return limits([row["against_argmax"][level] for row in d["results"]["draft_noise"]["rows"]])


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
        "per_request.drafts": lambda d: count(d["results"]["per_request"]["drafts"]),
        "ahead": lambda d: rollout(d, "beyond", "ahead"),
        "ahead.few": lambda d: modelled(d, 8),
        "ahead.many": lambda d: modelled(d, 64, 512),
        "ahead.low": lambda d: ahead_steps(d, "1e-6"),
        "ahead.high": lambda d: ahead_steps(d, "2e-5"),
        "shared": lambda d: rollout(d, "beyond", "shared"),
        "shared.apart": lambda d: texts(d, "four engines"),
        "shared.texts": lambda d: texts(d, "four engines, shared"),
        "shared.together": lambda d: texts(d, "one engine"),
        "mixed": lambda d: rollout(d, "beyond", "mixed"),
        "longest.new": lambda d: rollout(d, "queue", "longest"),
        "longest.same": lambda d: rollout(d, "epochs", "longest"),
        "longest.known": lambda d: forecast(d, "known"),
        "longest.wrong": lambda d: forecast(d, "exchanged"),
        "noise.chosen": chosen,
        "noise.half": lambda d: noise(d, "level 0.5"),
        "noise.full": lambda d: noise(d, "level 1"),
    },
)
