"""The parts of harvest measured by themselves: the engine beside a trainer, the coordinator."""

from __future__ import annotations

from registry.core import Doc, Rows, ms, table
from registry.e2e import mean


@table("harvest", "e2e/pairs/tail", "neighbour")
def measured(tail: Doc, neighbour: Doc) -> Rows:
    beside = [f"{neighbour[f'batch_{size}']['slow_down']['mean']:.3f}x" for size in (1, 4)]
    rows = {
        "idle worker seconds per RL step (`harvest/idle_s`)": (
            f"{mean(tail, 'tlt', 'harvest/idle_s'):.1f} s"
        ),
        "duration of an engine step beside a trainer, 1 running request": beside[0],
        "duration of an engine step beside a trainer, 4 running requests": beside[1],
        "a trainer that is called back stops, 99th percentile": ms(neighbour["stop_s"]["p99"]),
    }
    return [["what", "measured"], *([name, value] for name, value in rows.items())]
