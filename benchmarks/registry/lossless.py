"""Losslessness: what the keyed sampler costs, and samples with and without drafts compared."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, table
from tlt.bench.same import HEADS, cells

RIVALS = {"plain": "vLLM's sampler", "drafted": "TLT's earlier rejection sampler, 4 drafts"}


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


def spread_of(d: Doc, part: str, measure: str, kind: str, against: str = "") -> str:
    """Return the lowest and the highest value of a kind, or of its ratio to the best other kind."""
    found = []
    for policy in d["policies"].values():
        for row in policy[part]:
            values = {name: of[measure]["mean"] for name, of in row["kinds"].items()}
            best = max(value for name, value in values.items() if name != kind)
            found.append(values[kind] / best if against == "best" else values[kind])
    return f"{min(found):.2f} to {max(found):.2f}"


figures(
    "draft_noise",
    "draft_noise",
    {
        "chosen_of_best": lambda d: spread_of(d, "acceptance", "length", "chosen", "best"),
        "chosen": lambda d: spread_of(d, "acceptance", "length_vs_argmax", "chosen"),
        "full": lambda d: spread_of(d, "acceptance", "length_vs_argmax", "level 1"),
        "half": lambda d: spread_of(d, "acceptance", "length_vs_argmax", "level 0.5"),
        "speed.chosen": lambda d: spread_of(d, "speed", "speed_vs_argmax", "chosen"),
        "steps.raw": lambda d: str(d["policies"]["raw"]["drafter"]["optimizer_steps"]),
        "steps.sft": lambda d: str(d["policies"]["sft"]["drafter"]["optimizer_steps"]),
    },
)


# --- bfloat16 -------------------------------------------------------------------------------------


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
