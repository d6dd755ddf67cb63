"""How processes that compute wait for their threads, and in which dtype they compute."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, spread, table

WORK = {
    "sft": "`tlt sft`, tiny model",
    "update": "policy update, SmolLM2",
    "drafter": "drafter training, SmolLM2's size",
    "engine": "engine with two threads, SmolLM2",
}
WAITS = {"block": "`GOMP_SPINCOUNT=0`", "passive": "`OMP_WAIT_POLICY=passive`", "one": "one thread"}


@table("cpu.threads", "cpu")
def threads(d: Doc) -> Rows:
    rows = [["against the default of GNU OpenMP", "", *WAITS.values()]]
    for work, name in WORK.items():
        for condition, when in (("quiet", "quiet"), ("disturbed", "one core wanted by another")):
            cells = [spread(d["ratios"][f"{work}/{wait}/{condition}"]) for wait in WAITS]
            rows.append([name if condition == "quiet" else "", when, *cells])
    return rows


@table("cpu.dtypes", "cpu")
def dtypes(d: Doc) -> Rows:
    rows = [["", "bfloat16 against float32"]]
    return rows + [[name, spread(d["ratios"][f"{w}/bfloat16/quiet"])] for w, name in WORK.items()]


figures("cpu", "cpu", {"rounds": lambda d: str(d["rounds"])})
