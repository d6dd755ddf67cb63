"""Seeded faults and bad input at full size, and the soak."""

from __future__ import annotations

from statistics import median

from registry.core import Doc, Rows, count, figures, percent, spread, table

PARTS = {
    "rollout": "calls between the pool and its engines, in real time",
    "harvest": "calls between the coordinator and its trainers",
    "run": "calls between a whole run and its engines, ranks and trainers; the driver dies",
    "tools": "the same, and its tools",
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


@table("continuation", "continuation")
def continuation(d: Doc) -> Rows:
    """Return what a killed engine costs a rollout, with and without continuation."""
    runs = d["runs"]
    plain = median(run["seconds"] for run in runs["undisturbed"])
    rows = [["samples of the killed engine", "rollout", "lost", "tokens not drawn again"]]
    rows.append(["no engine is killed", f"{plain:.1f} s", "", ""])
    for arm in ("continue", "start again"):
        seconds = median(run["seconds"] for run in runs[arm])
        kept = median(run["kept_tokens"] for run in runs[arm])
        lost = spread(d["lost_s"][arm], "{:.1f}", " s")
        rows.append([arm, f"{seconds:.1f} s", lost, f"{kept:.0f}"])
    return rows


figures("continuation", "continuation", {"killed_at": lambda d: percent(d["killed_at"])})


@table("soak", "soak")
def soak(d: Doc) -> Rows:
    same = all(d["same"].values())
    resumed = d["resumed_from"]
    return [
        ["what", "found"],
        ["faults", f"{len(d['faults'])} in {d['minutes']:g} minutes, of {len(d['counts'])} kinds"],
        ["RL steps, starts of the driver", f"{count(d['num_steps'])}, {d['starts']}"],
        ["longest time without an RL step", f"{d['longest_without_step_s']:.0f} s"],
        ["the driver ended by itself", f"{len(d['ended_by_itself'])} times"],
        ["samples, metrics and policy", "as undisturbed" if same else "NOT as undisturbed"],
        ["resumed from checkpoints", f"{sum(resumed.values())} of {len(resumed)} end the same"],
        ["processes left at the end", str(d["processes_left"])],
        ["90th percentile, last third over first", _grown(d["growth"])],
        ["median, last third over first", _grown(d["growth_of_median"])],
    ]


def _grown(growth: dict[str, float]) -> str:
    return (
        f"memory {growth['memory_mib']:.2f}, shared memory {growth['shared_mib']:.2f}, "
        f"open files {growth['files']:.2f}, processes {growth['processes']:.2f}"
    )
