"""Losslessness: what the keyed sampler costs, and samples with and without drafts compared."""

from __future__ import annotations

from registry.core import Doc, Rows, table
from tlt.bench.same import HEADS, cells


@table("sampler.cost", "sampler")
def cost(d: Doc) -> Rows:
    rows = [["batch", "vLLM's sampler", "keyed", "ratio", "of an engine step"]]
    for batch, row in d["rows"]["plain"].items():
        low, high = row["ratio_quartiles"]
        cells = [f"{row['rival_ms']:.2f} ms", f"{row['keyed_ms']:.2f} ms"]
        cells += [f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{row['share_of_step']:.1%}"]
        rows.append([batch, *cells])
    return rows


@table("same", "same")
def same(d: Doc) -> Rows:
    return [list(HEADS), *cells(d)]


@table("bfloat16", "bfloat16")
def bfloat16(d: Doc) -> Rows:
    """Samples that differ through batch shapes, and how close the draw was where they part."""
    rows = [["type", "compared", "draft tokens", "samples that differ"]]
    rows[0] += ["draw missed by, median", "at most"]
    for dtype, pairs in d["results"].items():
        for pair, found in pairs.items():
            missed = [found["median_shortfall"], found["largest_shortfall"]]
            told = ["-" if value is None else f"{value:.3f} nats" for value in missed]
            differ = f"{found['differ']} of {d['settings']['samples']}"
            drafts = f"{found['draft_tokens']:,}"
            rows.append([dtype, pair.replace(" / ", " and "), drafts, differ, *told])
    return rows
