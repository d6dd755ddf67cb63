"""Losslessness: what the keyed sampler costs, and samples with and without drafts compared."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, table

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


def sameness(difference: Doc | None) -> str:
    if difference is None:
        return "yes"
    kind = "a near-tie" if difference["near_tie"] else "no near-tie"
    return f"no: sample {difference['sample']}, token {difference['position']}, {kind}"


@table("same", "same")
def same(d: Doc) -> Rows:
    heads = ["samples", "tokens", "draft tokens accepted", "tokens per draft", "seconds"]
    rows = [["mode", *heads, "same tokens as off"]]
    for number, row in enumerate(d["modes"]):
        drafted = row["draft_tokens"]
        rows.append(
            [
                row["mode"],
                str(row["samples"]),
                str(row["tokens"]),
                f"{row['accepted_tokens']}/{drafted}" if drafted else "",
                f"{row['tokens_per_draft']:.2f}" if drafted else "",
                f"{row['seconds']:.1f}",
                sameness(row["difference"]) if number else "reference",
            ]
        )
    return rows


figures("same", "same", {"verdict": lambda d: d["verdict"]})
