"""The drafter: what training brings, what it costs, what the plug-in costs."""

from __future__ import annotations

import statistics

from registry.core import Doc, Rows, count, figures, ms, several, spread, table


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


WAYS = {
    "likeliest": "likeliest token",
    "share 0.5": "half of the noise",
    "share 0.85": "0.85 of the noise",
    "share 1": "all of the noise",
    "ratio": "ratio test",
}


@table("distance", "distance")
def distance(d: Doc) -> Rows:
    head = ["temperature", "entropy", "total variation", "equal draws, counted", "by the formula"]
    rows = [[*head, *(f"tokens per draft: {label}" for label in WAYS.values())]]
    for temperature, of in d["temperatures"].items():
        first, lengths = of["places"][0], of["tokens_per_draft"]["3"]
        cells = [first[name] for name in ("entropy", "variation", "counted", "share 1")]
        cells += [lengths[way] for way in WAYS]
        rows.append([temperature, *(f"{value:.2f}" for value in cells)])
    return rows


LOSSES = {
    "ce": "cross-entropy",
    "agree": "minus the log of the chance of equal draws",
    "stages": "the same for draws in two stages, as on CPUs",
    "mix 0.1": "0.1 of the chance of equal draws, the rest cross-entropy",
    "mix 0.5": "half of each",
    "mix 0.9": "0.9 of the chance of equal draws",
    "ce, agree": "cross-entropy, then the chance of equal draws",
    "tv": "total variation",
    "chain": "minus the log of the expected tokens per draft",
}
NORMS = {"ce": "without", "ce 3.1": "with the norms of EAGLE-3.1"}


@table("losses", "losses")
def losses(d: Doc) -> Rows:
    return learned(d, "loss", LOSSES)


@table("norms", "losses")
def norms(d: Doc) -> Rows:
    return learned(d, "new drafter", NORMS)


def learned(d: Doc, head: str, names: dict[str, str]) -> Rows:
    """Return what new drafters learned in equal time."""
    rows = [[head, "optimizer steps", "tokens per draft, temperature 0.6", "temperature 1"]]
    for name, label in names.items():
        found = d["losses"][name]
        lengths = [found["tokens_per_draft"][t]["3"]["share 0.85"] for t in ("0.6", "1")]
        cells = [spread(length, unit="") for length in lengths]
        rows.append([label, count(found["optimizer_steps"]["median"]), *cells])
    return rows


figures(
    "norms",
    "norms",
    {
        "minutes": lambda d: f"{d['minutes']:.0f} minutes",
        "plain": lambda d: f"{d['tokens_per_draft']['without']:.2f}",
        "new": lambda d: f"{d['tokens_per_draft']['with']:.2f}",
        "learned": lambda d: ", ".join(
            f"{of['length@1']:.2f} after {of['elapsed_s']:.0f} s"
            for of in d["drafters"]["with"]["training"]["history"][1:]
        ),
    },
)

figures(
    "losses",
    "losses",
    {"seconds": lambda d: f"{d['seconds']:.0f} s", "seeds": lambda d: str(d["seeds"])},
)


@table("trainers", "trainers")
def trainers(d: Doc) -> Rows:
    tokens = [f"after {count(of)} tokens each" for of in d["tokens_of_each"]]
    return [["trainers", "tokens per row", *tokens]] + [
        [str(of["trainers"]), str(of["row_tokens"]), *(f"{x:.2f}" for x in of["tokens_per_draft"])]
        for of in d["rows"]
    ]


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
