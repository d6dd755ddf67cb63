"""What does it bring to dispatch the longest requests first, and what does a wrong forecast cost?

    python benchmarks/dispatch.py [--calibration calibration.json]

Modelled: rollouts of the simulator, which dispatches by the production code, with 16 samples an
engine in groups of 16, of prompts that come again in every RL step. Engines are H100s with a 7B
policy, or those of a calibration; the adaptive strategy speculates with a frozen drafter. Compared
are `arrival` and `longest_first` where the last epoch is known, where nothing is, and where the
last epoch was remembered wrongly: each length off by a random factor, or long and short prompts
exchanged. Writes results/dispatch.json and .png.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tlt.config.load import apply_overrides, check
from tlt.observe.provenance import provenance
from tlt.rollout.lengths import LengthForecast
from tlt.simulate import clock
from tlt.simulate.cluster import Simulation
from tlt.simulate.scenario import ScenarioConfig, cluster_of, mode_of, workload_of

RESULT = Path(__file__).parent / "results" / "dispatch.json"
STEPS = {8: 9, 64: 3, 512: 2}
"""RL steps by number of engines. Nothing is known in the first."""
SAMPLES, GROUP = 16, 16
SLOTS = (256, 8)
"""Requests that an engine runs at once: all of them, or half of them while the rest waits."""
SPREADS = {"narrow": 4000, "medium": 6000, "wide": 12000}
"""95th percentile of the lengths; their median is 2,500 tokens, and the longest have 32,768."""
NOISE = 0.7
"""Standard deviation of the logarithm of a random factor: usually between a half and twice."""
FORECASTS = {
    8: ("known", "noisy", "exchanged"),
    64: ("known", "noisy", "exchanged"),
    512: ("known",),
}


class Wrong(LengthForecast):
    """A forecast that remembers every rollout wrongly. What it sees in a rollout is right."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def rollout_ended(self) -> None:
        super().rollout_ended()
        right = self.state()
        if self._how == "noisy":
            self.restore({p: round(n * self._factor(p)) for p, n in right.items()})
        else:
            ranked = sorted(right, key=lambda p: right[p])
            pairs = zip(ranked, reversed(ranked), strict=True)
            self.restore({prompt: right[other] for prompt, other in pairs})

    def _factor(self, prompt: str) -> float:
        return math.exp(random.Random(prompt).gauss(0, NOISE))


def rollouts(settings: list[str], order: str, forecast: str) -> list[dict[str, float]]:
    tree = apply_overrides({}, [*settings, f'cluster.dispatch="{order}"'])
    config = check(ScenarioConfig, tree, "scenario")
    cluster = cluster_of(config)
    mode = replace(mode_of("tlt", config, cluster.drafting), harvest=None)
    run = Simulation(cluster, workload_of(config), mode, config.seed)
    if forecast in ("noisy", "exchanged"):
        run.lengths = Wrong(forecast)
    return clock.run(run.run(config.num_steps))


def mean(records: list[dict[str, float]]) -> dict[str, float]:
    return {
        "rollout_s": statistics.fmean(r["time/rollout_s"] for r in records),
        "idle_share": statistics.fmean(r["rollout/idle_share"] for r in records),
    }


def compared(machine: list[str], engines: int, slots: int, p95: int) -> dict[str, Any]:
    settings = [
        *machine,
        f"num_steps={STEPS[engines]}",
        f"cluster.num_engines={engines}",
        f"cluster.slots={slots}",
        f"workload.prompts_per_step={engines * SAMPLES // GROUP}",
        f"workload.group_size={GROUP}",
        f"workload.lengths={{median=2500, p95={p95}, longest=32768}}",
        "workload.epoch_steps=1",
        "drafter.drift=0",
    ]
    arrival = rollouts(settings, "arrival", "")
    found = {"arrival": mean(arrival[1:]), "arrival_first": mean(arrival[:1])}
    for forecast in FORECASTS[engines]:
        records = rollouts(settings, "longest_first", forecast)
        found[forecast] = mean(records[1:])
        if forecast == "known":
            found["unknown"] = mean(records[:1])
    for name, of in found.items():
        base = found["arrival_first" if name == "unknown" else "arrival"]
        of["speed_up"] = base["rollout_s"] / of["rollout_s"]
    del found["arrival_first"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, help="result of `tlt calibrate`")
    options = parser.parse_args()
    machines = {"7B on H100s": ['cluster.model="qwen2.5-7b"']}
    if options.calibration:
        machines["calibrated"] = [f'cluster.calibration="{options.calibration}"']
    rows = []
    for name, machine in machines.items():
        for engines in STEPS:
            for slots in SLOTS:
                for spread, p95 in SPREADS.items():
                    started_s = time.monotonic()
                    found = compared(machine, engines, slots, p95)
                    row = {"machine": name, "engines": engines, "slots": slots, "spread": spread}
                    rows.append({**row, "found": found})
                    gains = {key: round(of["speed_up"], 3) for key, of in found.items()}
                    print(row, gains, f"{time.monotonic() - started_s:.0f} s", flush=True)
    engine = {
        name: asdict(cluster_of(check(ScenarioConfig, apply_overrides({}, of), name)).engine)
        for name, of in machines.items()
    }
    settings = {"samples": SAMPLES, "group": GROUP, "steps": STEPS, "noise": NOISE}
    result = {"provenance": provenance(), "settings": settings, "engine": engine, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    plot(rows, RESULT.with_suffix(".png"))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from canvas import pyplot
    from tlt.colours import INK

    shown = {
        "known": "last epoch known",
        "unknown": "nothing known",
        "noisy": "each length off by a random factor",
        "exchanged": "long and short exchanged",
    }
    mine = [row for row in rows if row["machine"] == rows[0]["machine"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(9.4, 4.2), sharey=True, layout="constrained")
    for axis, slots in zip(axes, SLOTS, strict=True):
        of = [row for row in mine if row["slots"] == slots]
        for place, (name, label) in enumerate(shown.items()):
            there = [(index, row["found"]) for index, row in enumerate(of) if name in row["found"]]
            at = [index + 0.2 * (place - 1.5) for index, _ in there]
            gains = [100 * (found[name]["speed_up"] - 1) for _, found in there]
            axis.bar(at, gains, 0.18, label=label)
        names = [f"{row['spread']}\n{row['engines']}" for row in of]
        axis.set_xticks(range(len(of)), names, fontsize=8)
        axis.axhline(0, color=INK, lw=1)
        waits = "all requests run at once" if slots >= SAMPLES else "half of the requests wait"
        axis.set(title=waits, xlabel="spread of the lengths, engines")
    axes[0].set_ylabel("faster than in order of arrival, %")
    axes[0].legend(fontsize=8)
    figure.suptitle("Longest first pays where requests wait for a slot (modelled)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
