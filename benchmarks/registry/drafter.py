"""The drafter: what training brings, what it costs, what the plug-in costs."""

from __future__ import annotations

import statistics
from typing import Any

from registry.core import Doc, Rows, count, figures, ms, percent, several, spread, table, times


@table("drafter.acceptance", "drafter/report")
def acceptance(d: Doc) -> Rows:
    rows = [[f"acceptance length, {d['num_draft_tokens']} draft tokens", "untrained", "trained"]]
    for temperature in d["acceptance"]["after"]:
        found = [d["acceptance"][when][temperature]["length"] for when in ("before", "after")]
        rows.append([f"temperature {temperature}", *(f"{value:.2f}" for value in found)])
    return rows


def minutes(d: Doc, *stages: str) -> str:
    return f"{sum(d['seconds'][stage] for stage in stages) / 60:.1f}"


figures(
    "drafter",
    "drafter/report",
    {
        "samples": lambda d: count(d["data"]["num_prompts"]),
        "budget": lambda d: f"{d['budget_minutes']:.0f} minutes",
        "new.first": lambda d: f"{d['acceptance']['before']['1']['by_position'][0]:.1%}",
        "median_tokens": lambda d: count(d["data"]["median_tokens"]),
        "p99_tokens": lambda d: count(d["data"]["p99_tokens"]),
        "steps": lambda d: count(d["training"]["steps"]),
        "row_tokens": lambda d: count(d["training"]["settings"]["row_tokens"]),
        "minutes": lambda d: (
            f"{minutes(d, 'sample')} minutes of sampling, {minutes(d, 'capture')} of capture, "
            f"{minutes(d, 'train')} of training, "
            f"{minutes(d, 'start', 'measure before', 'measure after')} of start and measuring"
        ),
    },
)


@table("drafter_speed", "drafter_speed")
def speed(d: Doc) -> Rows:
    by_size = {found["batch_size"]: found["modes"] for found in d["results"]}
    rows = [["draft tokens", *(f"batch {size}" for size in by_size)]]
    for modes in zip(*by_size.values(), strict=True):
        if modes[0]["draft_tokens"]:
            cells = [several([m["speed_low"], m["speed_vs_off"], m["speed_high"]]) for m in modes]
            rows.append([str(modes[0]["draft_tokens"]), *cells])
    return rows


def runs_of(d: Doc) -> list[Doc]:
    return [mode["parts_of_one_run"] for found in d["results"] for mode in found["modes"]]


def shares(d: Doc) -> str:
    """Return the range of the share of matrix products in an engine step."""
    found = [sum(run["ms_of_products"].values()) / run["ms_per_step"] for run in runs_of(d)]
    return f"{100 * min(found):.0f} to {percent(max(found))}"


def own(d: Doc) -> str:
    """Return the range of the share of sampling and of draft passes without their products."""
    found = []
    for run in runs_of(d):
        part, products = run["ms_per_part"], run["ms_of_products"]
        drafting = max(0.0, part.get("proposer", 0.0) - products.get("proposer", 0.0))
        found.append((part["sampling"] + drafting) / run["ms_per_step"])
    return f"{100 * min(found):.0f} to {percent(max(found))}"


PARTS = {
    "target pass": "target pass",
    "proposer": "draft passes",
    "proposer: draft heads": "of these, draft heads",
    "target head": "target head",
    "sampling": "sampling",
}


@table("drafter_speed.parts", "drafter_speed")
def parts(d: Doc) -> Rows:
    """Parts of an engine step without drafts and with the longest ones."""
    shown = {
        f"batch {found['batch_size']}, {mode['draft_tokens'] or 'no'} drafts": mode
        for found in d["results"]
        for mode in (found["modes"][0], found["modes"][-1])
    }
    runs = [mode["parts_of_one_run"] for mode in shown.values()]
    rows = [["milliseconds of an engine step", *shown]]
    rows += [["all", *(f"{run['ms_per_step']:.1f}" for run in runs)]]
    for part, label in PARTS.items():
        cells = [run["ms_per_part"].get(part) for run in runs]
        rows.append([label, *("" if ms is None else f"{ms:.1f}" for ms in cells)])
    products = [sum(run["ms_of_products"].values()) for run in runs]
    rows.append(["matrix products alone", *(f"{ms:.1f}" for ms in products)])
    shares = [ms / run["ms_per_step"] for ms, run in zip(products, runs, strict=True)]
    rows.append(["their share of the engine step", *(percent(share) for share in shares)])
    return rows


figures(
    "drafter_speed",
    "drafter_speed",
    {
        "rounds": lambda d: str(d["options"]["rounds"]),
        "size": lambda d: str(d["options"]["size"]),
        "dtype": lambda d: d["options"]["dtype"],
        "products": lambda d: shares(d),
        "own": lambda d: own(d),
    },
)


def faster(found: Doc) -> str:
    return spread(found | {"median": found["packed_is_faster_by"]})


figures(
    "packing",
    "packing",
    {
        "padded": lambda d: faster(d["padded"]),
        "sorted": lambda d: faster(d["sorted"]),
        "padded.median": lambda d: times(d["padded"]["packed_is_faster_by"]),
        "padded.filled": lambda d: percent(d["padded"]["filled"]),
        "samples": lambda d: count(d["options"]["samples"]),
        "row_tokens": lambda d: count(d["options"]["row_tokens"]),
        "rounds": lambda d: str(d["options"]["rounds"]),
        "median_tokens": lambda d: count(d["lengths"]["median"]),
        "longest_tokens": lambda d: count(d["lengths"]["longest"]),
    },
)

figures(
    "checkpoint",
    "checkpoint",
    {
        "ours": lambda d: ms(statistics.median(d["stall_s"]["ours"])),
        "full": lambda d: ms(statistics.median(d["stall_s"]["full"])),
        "shorter": lambda d: spread(d | {"median": d["stall_shorter_by"]}, "{:.0f}"),
        "draft_vocab": lambda d: count(d["options"]["draft_vocab"]),
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
        "lookup_8": lambda d: f"{lookup(d, 8)} µs",
        "lookup_32": lambda d: f"{lookup(d, 32)} µs",
        "mib": lambda d: f"{d['lookup']['1000000']['mib']:.0f} MiB",
        "bytes_per_token": lambda d: count(d["lookup"]["1000000"]["mib"] * 2**20 / 1e6),
        "prompts": lambda d: str(d["options"]["prompts"]),
        "siblings": lambda d: str(d["options"]["siblings"]),
        "drafted": lambda d: str(d["options"]["drafted"]),
        "concurrency": lambda d: str(d["options"]["concurrency"]),
    },
)


def served(at_once: int) -> Any:
    return lambda d: spread(d[f"speed_up_{at_once}"])


figures(
    "served",
    "served",
    {
        "one": served(1),
        "four": served(4),
        "rounds": lambda d: str(len({row["round"] for row in d["rounds"]})),
    },
)
