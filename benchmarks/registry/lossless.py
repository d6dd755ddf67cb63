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


# --- drafts with the request's noise ------------------------------------------------------------

POLICIES = {"raw": "raw, natural prompts", "sft": "after `tlt sft`, sums"}
KINDS = {"level 0": "argmax", "level 0.5": "level 0.5", "level 1": "level 1", "chosen": "chosen"}


def noise_rows(d: Doc, part: str, measure: str) -> Rows:
    """Return one row per policy and setting, with a measure of every kind of draft."""
    rows = [["SmolLM2", "batch", "K", "temperature", "entropy", *KINDS.values()]]
    for policy, label in POLICIES.items():
        for row in d["policies"].get(policy, {}).get(part, []):
            cells = [label, str(row["batch_size"]), str(row["draft_tokens"])]
            cells += [f"{row['temperature']:g}", f"{row['entropy']:.2f}"]
            for kind in KINDS:
                found = row["kinds"][kind][measure]
                error = found["standard_error"]
                known = "" if error == 0 else f" ± {error:.3f}"
                cells.append(f"{found['mean']:.3f}{known}")
            rows.append(cells)
    return rows


@table("draft_noise.acceptance", "draft_noise")
def noise_acceptance(d: Doc) -> Rows:
    return noise_rows(d, "acceptance", "length")


@table("draft_noise.ratio", "draft_noise")
def noise_ratio(d: Doc) -> Rows:
    return noise_rows(d, "acceptance", "length_vs_argmax")


@table("draft_noise.speed", "draft_noise")
def noise_speed(d: Doc) -> Rows:
    return noise_rows(d, "speed", "speed_vs_argmax")


# --- bfloat16 -------------------------------------------------------------------------------------


@table("bfloat16", "bfloat16")
def bfloat16(d: Doc) -> Rows:
    """Samples that differ through batch shapes, and how close the draw was where they part."""
    rows = [["type", "compared", "samples that differ", "draw missed by, median", "at most"]]
    for dtype, pairs in d["results"].items():
        for pair, found in pairs.items():
            missed = [found["median_shortfall"], found["largest_shortfall"]]
            told = ["-" if value is None else f"{value:.3f} nats" for value in missed]
            differ = f"{found['differ']} of {d['settings']['samples']}"
            rows.append([dtype, pair.replace(" / ", " and "), differ, *told])
    return rows
