"""Losslessness: what the keyed sampler costs, and samples with and without drafts compared."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, table
from tlt.bench.same import HEADS, cells

RIVALS = {"plain": "vLLM's sampler", "drafted": "rejection sampler before, 4 drafts"}


@table("sampler.cost", "sampler")
def cost(d: Doc) -> Rows:
    rows = [["against", "batch", "before", "keyed", "ratio", "of an engine step"]]
    for name, rival in RIVALS.items():
        for batch, row in d["rows"][name].items():
            low, high = row["ratio_quartiles"]
            rows.append(
                [
                    rival,
                    batch,
                    f"{row['rival_ms']:.2f} ms",
                    f"{row['keyed_ms']:.2f} ms",
                    f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
                    f"{row['share_of_step']:.1%}",
                ]
            )
    return rows


@table("same", "same")
def same(d: Doc) -> Rows:
    return [list(HEADS), *cells(d)]


figures("same", "same", {"verdict": lambda d: d["verdict"]})
