"""The drafter: what training brings, what it costs, what the plug-in costs."""

from __future__ import annotations

import statistics

from registry.core import Doc, Rows, count, figures, ms, several, table


@table("drafter.acceptance", "drafter/report")
def acceptance(d: Doc) -> Rows:
    rows = [[f"acceptance length, {d['num_draft_tokens']} draft tokens", "untrained", "trained"]]
    for temperature in d["acceptance"]["after"]:
        found = [d["acceptance"][when][temperature]["length"] for when in ("before", "after")]
        rows.append([f"temperature {temperature}", *(f"{value:.2f}" for value in found)])
    return rows


figures(
    "drafter",
    "drafter/report",
    {
        "budget": lambda d: f"{d['budget_minutes']:.0f} minutes",
        "new.first": lambda d: f"{d['acceptance']['before']['1']['by_position'][0]:.1%}",
        "median_tokens": lambda d: count(d["data"]["median_tokens"]),
        "p99_tokens": lambda d: count(d["data"]["p99_tokens"]),
        "steps": lambda d: count(d["training"]["steps"]),
        "row_tokens": lambda d: count(d["training"]["settings"]["row_tokens"]),
    },
)


COMPARED = {
    "tlt+eagle3 / bare+eagle3": "TLT with a fixed strategy against vLLM's own drafting",
    "tlt / bare": "TLT without a drafter against bare vLLM",
    "tlt+idle / bare": "TLT with an idle drafter against bare vLLM",
    "tlt+capture / tlt+idle": "the same, keeping hidden states, against not keeping them",
}


@table("overhead", "overhead")
def overhead(d: Doc) -> Rows:
    rows = [["tokens a second", *(f"batch {found['batch_size']}" for found in d["results"])]]
    rows += [
        [label, *(several(found["ratios"][name]) for found in d["results"])]
        for name, label in COMPARED.items()
    ]
    return rows


figures(
    "overhead",
    "overhead",
    {
        "rounds": lambda d: str(d["options"]["rounds"]),
        "draft_tokens": lambda d: str(d["options"]["num_draft_tokens"]),
        "dtype": lambda d: d["options"]["dtype"],
        "drafter": lambda d: d["options"]["drafter"],
        "fingerprint.swap": lambda d: ms(statistics.median(d["fingerprint_s"]["update_drafter"])),
        "fingerprint.sync": lambda d: ms(statistics.median(d["fingerprint_s"]["update_policy"])),
        "fingerprint.step": lambda d: ms(
            1 / statistics.median(d["results"][0]["tokens_per_s"]["tlt+idle"])
        ),
        "capture.small": lambda d: several(d["results"][0]["ratios"]["tlt+capture / tlt+idle"]),
        "capture.large": lambda d: several(d["results"][-1]["ratios"]["tlt+capture / tlt+idle"]),
        "capture.large_size": lambda d: str(d["results"][-1]["batch_size"]),
    },
)


def lookup(d: Doc, size: int) -> str:
    return f"{d['lookup']['1000000'][f'batch {size}']['median_us']:.0f}"


figures(
    "history",
    "history",
    {
        "own": lambda d: f"{d['replay']['own text']['tokens_per_step']:.2f}",
        "first_epoch": lambda d: f"{d['replay']['history, first epoch']['tokens_per_step']:.2f}",
        "two_epochs": lambda d: f"{d['replay']['history']['tokens_per_step']:.2f}",
        "lookup_1": lambda d: f"{lookup(d, 1)} µs",
        "lookup_32": lambda d: f"{lookup(d, 32)} µs",
        "mib": lambda d: f"{d['lookup']['1000000']['mib']:.0f} MiB",
        "bytes_per_token": lambda d: count(d["lookup"]["1000000"]["mib"] * 2**20 / 1e6),
        "prompts": lambda d: str(d["options"]["prompts"]),
        "siblings": lambda d: str(d["options"]["siblings"]),
        "drafted": lambda d: str(d["options"]["drafted"]),
        "concurrency": lambda d: str(d["options"]["concurrency"]),
    },
)
