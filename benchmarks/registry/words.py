"""Word problems: lengths of the responses, and training of a drafter (`words.sh`)."""

from __future__ import annotations

from registry.core import count, figures

figures(
    "words.drafter",
    "words/report",
    {
        "steps": lambda d: count(d["training"]["steps"]),
        "samples": lambda d: count(d["data"]["num_prompts"]),
        "median_tokens": lambda d: count(d["data"]["median_tokens"]),
        "p99_tokens": lambda d: count(d["data"]["p99_tokens"]),
        "tail": lambda d: f"{d['data']['p99_tokens'] / d['data']['median_tokens']:.1f}x",
        "budget": lambda d: f"{d['budget_minutes']:.0f} minutes",
        "after": lambda d: f"{d['acceptance']['after']['1']['length']:.2f}",
        "held_out": lambda d: count(d["num_held_out_prompts"]),
    },
)
