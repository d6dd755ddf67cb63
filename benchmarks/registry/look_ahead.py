"""Look-ahead: what survives a policy update under the same noise (`benchmarks/look_ahead.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from registry.core import Doc, Rows, figures, percent, table

FILE = "look_ahead"
LABELS = {
    "raw": "paragraphs, temperature 1",
    "cool": "paragraphs, temperature 0.6",
    "sft": "sums after `tlt sft`",
}
TEXT_ENTROPIES = (0.0, 0.5, 1.5, 2.5)
"""Lower limits of the ranges of a text's mean entropy."""


def starts(d: Doc) -> list[str]:
    """Return the starts that were measured, in the order of the tables."""
    return [start for start in LABELS if any(run["start"] == start for run in d["runs"])]


def run_of(d: Doc, start: str) -> Doc:
    (run,) = (run for run in d["runs"] if run["start"] == start)
    return run


def pairs_of(d: Doc, start: str, first: bool) -> dict[float, Doc]:
    """Return the pairs of policies of the first or the last measured update by learning rate."""
    run = run_of(d, start)
    update = 1 if first else run["num_updates"]
    return {pair["lr"]: pair for pair in run["pairs"] if pair["update"] == update}


def mean(pair: Doc, key: str) -> float:
    """Return the mean of a measure over all tokens."""
    bins = pair["by_entropy"]
    return sum(of[key] for of in bins) / sum(of["tokens"] for of in bins)


def total(texts: Iterable[Doc], key: str) -> int:
    return sum(text[key] for text in texts)


def lr_text(lr: float) -> str:
    mantissa, exponent = f"{lr:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def listed(d: Doc) -> list[tuple[list[str], Doc]]:
    """Return the pairs in the order of the tables, each with its first cells."""
    found = []
    for start in starts(d):
        only = run_of(d, start)["num_updates"] == 1
        for first in (False,) if only else (True, False):
            for lr, pair in sorted(pairs_of(d, start, first).items()):
                found.append(([LABELS[start], str(pair["update"]), lr_text(lr)], pair))
    return found


HEAD = ["policy", "update", "learning rate"]


@table("look_ahead.tokens", FILE)
def tokens(d: Doc) -> Rows:
    rows = [[*HEAD, "entropy", "KL", "TV", "agreement", "bound"]]
    for cells, pair in listed(d):
        rows.append(
            [
                *cells,
                f"{mean(pair, 'entropy'):.2f}",
                f"{mean(pair, 'kl'):.1e}",
                f"{mean(pair, 'tv'):.4f}",
                f"{mean(pair, 'agreed'):.4f}",
                f"{mean(pair, 'bound'):.4f}",
            ]
        )
    return rows


def quartiles(texts: list[Doc]) -> list[str]:
    """Return the quartiles of the tokens before two texts part; a text may never part."""
    lengths = sorted(
        math.inf if text["first_difference"] is None else text["first_difference"] for text in texts
    )
    places = [lengths[max(0, math.ceil(share * len(lengths)) - 1)] for share in (0.25, 0.5, 0.75)]
    return ["never" if place == math.inf else str(place) for place in places]


def never(texts: list[Doc]) -> float:
    return sum(text["first_difference"] is None for text in texts) / len(texts)


def per_step(texts: list[Doc], steps: str, length: int) -> float:
    """Return tokens per engine step with drafts of this length."""
    return total(texts, "num_tokens") / sum(text[steps][str(length)] for text in texts)


def after(texts: list[Doc], key: str) -> str:
    """Return the share of tokens after the first difference that the old text predicts."""
    count = total(texts, "tokens_after")
    return percent(total(texts, key) / count) if count else "-"


@table("look_ahead.texts", FILE)
def texts(d: Doc) -> Rows:
    rows = [[*HEAD, "tokens until they part, quartiles", "never part"]]
    rows[0] += ["same position", "by match"]
    for cells, pair in listed(d):
        of = pair["texts"]
        rows.append([*cells, ", ".join(quartiles(of)), percent(never(of))])
        rows[-1] += [after(of, "same_position"), after(of, "by_match")]
    return rows


@table("look_ahead.drafts", FILE)
def drafts(d: Doc) -> Rows:
    rows = [[*HEAD]]
    for length in (4, 8):
        rows[0] += [f"K = {length}, same noise", f"K = {length}, other noise"]
    for cells, pair in listed(d):
        rows.append(cells)
        for length in (4, 8):
            for steps in ("steps", "steps_other"):
                rows[-1].append(f"{per_step(pair['texts'], steps, length):.2f}")
    return rows


def ranges(limits: list[float]) -> list[str]:
    ends = [*(f"{low:g} to {high:g}" for low, high in pairwise(limits))]
    return [*ends, f"above {limits[-1]:g}"]


@table("look_ahead.entropy", FILE)
def entropy(d: Doc) -> Rows:
    """Agreement by the old policy's entropy, at the last measured update."""
    found = {start: pairs_of(d, start, first=False) for start in starts(d)}
    head = ["entropy of the token, nats"]
    for start, pairs in found.items():
        rates = sorted(pairs)
        head += [f"{LABELS[start]}: tokens", *(f"agreement at {lr_text(lr)}" for lr in rates)]
    limits = [of["entropy_from"] for of in next(iter(found["raw"].values()))["by_entropy"]]
    rows = [head]
    for index, label in enumerate(ranges(limits)):
        cells = [label]
        for pairs in found.values():
            bins = [pairs[lr]["by_entropy"][index] for lr in sorted(pairs)]
            cells.append(str(bins[0]["tokens"]))
            cells += [f"{of['agreed'] / of['tokens']:.3f}" if of["tokens"] else "-" for of in bins]
        rows.append(cells)
    return rows


@table("look_ahead.realign", FILE)
def realign(d: Doc) -> Rows:
    """What the old text predicts after the first difference, by the text's mean entropy."""
    every = [text for _, pair in listed(d) for text in pair["texts"]]
    rows = [["mean entropy of the text, nats", "texts that part", "same position", "by match"]]
    limits = [*TEXT_ENTROPIES, math.inf]
    for label, (low, high) in zip(ranges(list(TEXT_ENTROPIES)), pairwise(limits), strict=True):
        of = [text for text in every if low <= text["entropy"] < high]
        parted = [text for text in of if text["first_difference"] is not None]
        rows.append([label, f"{len(parted)} of {len(of)}"])
        rows[-1] += [after(parted, "same_position"), after(parted, "by_match")]
    return rows


def share(d: Doc, key: str) -> str:
    """Return a share over all pairs, in percent with one decimal."""
    of = [pair for _, pair in listed(d)]
    if key == "redrawn":
        bins = [part for pair in of for part in pair["by_entropy"]]
        return f"{total(bins, 'redrawn') / total(bins, 'tokens'):.2%}"
    every = [text for pair in of for text in pair["texts"]]
    return f"{sum(text[key] for text in every)} of {len(every)}"


def agreements(d: Doc, lr: float) -> str:
    """Return the range of agreement at a learning rate over the policies."""
    found = [mean(p, "agreed") for _, p in listed(d) if math.isclose(p["lr"], lr)]
    return f"{min(found):.4f} to {max(found):.4f}"


def ratio(d: Doc) -> str:
    """Return disagreement divided by TV over all pairs."""
    bins = [part for _, pair in listed(d) for part in pair["by_entropy"]]
    count = total(bins, "tokens")
    return f"{(count - total(bins, 'agreed')) / sum(of['tv'] for of in bins):.2f}"


def changes(d: Doc, first: bool) -> str:
    """Return the root mean square of an update in learning rates, per start."""
    found = [next(iter(pairs_of(d, start, first).values())) for start in starts(d)]
    return " and ".join(f"{pair['rms_change_of_lr']:.2f}" for pair in found)


def saved(d: Doc, lr: float, last: bool = True) -> str:
    """Return tokens per engine step with drafts of 8 old tokens, over the starts."""
    found = []
    for start in starts(d):
        pairs = pairs_of(d, start, first=not last)
        if lr in pairs:
            found.append(per_step(pairs[lr]["texts"], "steps", 8))
    return f"{min(found):.1f} to {max(found):.1f}"


figures(
    FILE,
    FILE,
    {
        "steps.low": lambda d: saved(d, 1e-6),
        "steps.middle": lambda d: saved(d, 5e-6),
        "steps.high": lambda d: saved(d, 2e-5),
        "redrawn": lambda d: share(d, "redrawn"),
        "as_teacher_forced": lambda d: share(d, "as_teacher_forced"),
        "disagreement_of_tv": ratio,
        "agreement.low": lambda d: agreements(d, 1e-6),
        "change.first": lambda d: changes(d, first=True),
        "change.last": lambda d: changes(d, first=False),
        "updates": lambda d: str(run_of(d, "raw")["num_updates"]),
        "samples": lambda d: str(len(run_of(d, "raw")["pairs"][0]["texts"])),
        "samples.last": lambda d: str(len(run_of(d, "raw")["pairs"][-1]["texts"])),
    },
)
