"""The drafter: what training brings, what it costs, what the plug-in costs."""

from __future__ import annotations

from registry.core import Doc, Rows, count, figures, several, spread, table


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


NORMS = {"ce": "without", "ce 3.1": "with the norms of EAGLE-3.1"}


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
    "losses",
    "losses",
    {"seconds": lambda d: f"{d['seconds']:.0f} s"},
)


@table("trainers", "trainers")
def trainers(d: Doc) -> Rows:
    tokens = [f"{count(of)} tokens" for of in d["tokens_of_each"]]
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
    },
)


figures(
    "history",
    "history",
    {
        "own": lambda d: f"{d['replay']['own text']['tokens_per_step']:.2f}",
        "first_epoch": lambda d: f"{d['replay']['history, first epoch']['tokens_per_step']:.2f}",
        "bytes_per_token": lambda d: count(d["lookup"]["1000000"]["mib"] * 2**20 / 1e6),
    },
)
