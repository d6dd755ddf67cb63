"""Seeded faults and bad input at full size, and the soak."""

from __future__ import annotations

from registry.core import Doc, Rows, count, table

PARTS = {
    "rollout": "calls between the pool and its engines, in real time",
    "harvest": "calls between the coordinator and its trainers",
    "run": "calls between a whole run and its engines, ranks and trainers; the driver dies",
    "input": "files and values that users give",
}


@table("faults", "faults")
def faults(d: Doc) -> Rows:
    rows = [["faults in", "drawn", "computing", "tests that passed", "tests that failed"]]
    for part, what in PARTS.items():
        found = d["parts"][part]
        number = f"{count(found['count'])} {'inputs' if part == 'input' else 'seeds'}"
        passed, failed = str(found["passed"]), str(found["failed"])
        rows.append([what, number, f"{found['cpu_seconds']:.0f} s", passed, failed])
    return rows
