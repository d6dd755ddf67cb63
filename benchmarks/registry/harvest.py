"""The parts of harvest measured by themselves: the engine beside a trainer, the coordinator."""

from __future__ import annotations

from registry.core import Doc, Rows, count, figures, ms, spread, table
from registry.e2e import mean


@table("harvest", "e2e/pairs/tail", "neighbour", "learner")
def measured(tail: Doc, neighbour: Doc, learner: Doc) -> Rows:
    beside = [f"{neighbour[f'batch_{size}']['slow_down']['mean']:.3f}x" for size in (1, 4)]
    rows = {
        "idle worker seconds per RL step (`harvest/idle_s`)": (
            f"{mean(tail, 'tlt', 'harvest/idle_s'):.1f} s"
        ),
        "duration of an engine step beside a trainer, 1 running request": beside[0],
        "duration of an engine step beside a trainer, 4 running requests": beside[1],
        "a trainer that is called back stops, 99th percentile": ms(neighbour["stop_s"]["p99"]),
        "the learner's update with its capture of hidden states, against without": spread(
            learner["capture_against_tlt"]
        ),
    }
    return [["what", "measured"], *([name, value] for name, value in rows.items())]


@table("neighbour", "neighbour")
def neighbour(d: Doc) -> Rows:
    rows = [["running requests", "engine step beside a trainer", "95% interval", "intervals"]]
    for size in (1, 4):
        found = d[f"batch_{size}"]["slow_down"]
        low, high = found["interval_95"]
        rows.append(
            [str(size), f"{found['mean']:.3f}x", f"{low:.3f} to {high:.3f}", count(found["count"])]
        )
    return rows


figures(
    "neighbour",
    "neighbour",
    {
        "stop.median": lambda d: ms(d["stop_s"]["median"]),
        "stop.p99": lambda d: ms(d["stop_s"]["p99"]),
        "stop.max": lambda d: ms(d["stop_s"]["max"]),
        "stop.count": lambda d: count(d["stop_s"]["count"]),
    },
)


@table("coordinator", "coordinator")
def coordinator(d: Doc) -> Rows:
    rows = [
        [
            *("workers", "coordinator's events a second", "longest pause"),
            *("device free after, 99th percentile", "samples handled a second"),
            *("sample handled after, 99th percentile", "with 8 leases", "without the coordinator"),
        ]
    ]
    for row in d["rows"]:
        pause, free = ms(row["pause_max_s"]), ms(row["needed_to_free_p99_s"])
        samples = count(row["dispatches_per_s"])
        names = ("dispatch_late", "dispatch_late_few_leases", "dispatch_late_alone")
        late = [ms(row[name]["p99_s"]) for name in names]
        events = count(row["events_per_s"])
        rows.append([count(row["workers"]), events, pause, free, samples, *late])
    return rows


figures(
    "coordinator",
    "coordinator",
    {
        "workers": lambda d: count(d["rows"][-1]["workers"]),
        "events": lambda d: count(d["rows"][-1]["events_per_s"]),
        "pause": lambda d: ms(d["rows"][-1]["pause_max_s"]),
        "dispatch": lambda d: ms(d["rows"][-1]["dispatch_late_few_leases"]["p99_s"]),
    },
)
