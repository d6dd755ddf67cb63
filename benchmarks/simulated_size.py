"""How long simulations of large clusters take, and what an event costs the real coordinator.

    python benchmarks/simulated_size.py

RL steps of TLT, 16 samples a worker. What the coordinator costs is the time of the same simulation
with harvest, less that without it, over the times it was told that a worker is idle or needed. All
times are processor time of this process, which other programs change little. Writes
results/simulated_size.json.
"""

from __future__ import annotations

import time
from dataclasses import replace

from common import save
from tlt.config.load import apply_overrides, check
from tlt.simulate import clock
from tlt.simulate.cluster import Mode, Simulation
from tlt.simulate.scenario import ScenarioConfig, cluster_of, mode_of, workload_of

SIZES = ((64, 100), (256, 100), (1024, 100), (4096, 20), (10_000, 10))
"""Workers and steps."""


def timed(config: ScenarioConfig, mode: Mode) -> tuple[float, int]:
    run = Simulation(cluster_of(config), workload_of(config), mode, config.seed)
    started_s = time.process_time()
    clock.run(run.run(config.num_steps))
    return time.process_time() - started_s, run.events


def main() -> None:
    rows = []
    for workers, steps in SIZES:
        changes = [f"cluster.num_engines={workers}", f"workload.prompts_per_step={workers}"]
        tree = apply_overrides({}, [*changes, f"num_steps={steps}"])
        config = check(ScenarioConfig, tree, "scenario")
        mode = mode_of("tlt", config, cluster_of(config).drafting)
        with_s, events = timed(config, mode)
        without_s, _ = timed(config, replace(mode, harvest=None))
        rows.append(
            {
                "workers": workers,
                "steps": steps,
                "samples_per_step": workers * config.workload.group_size,
                "processor_s": round(with_s, 2),
                "events": events,
                "coordinator_us_per_event": round(1e6 * (with_s - without_s) / max(1, events), 1),
            }
        )
        print(rows[-1], flush=True)
    save("simulated_size", {"rows": rows})


if __name__ == "__main__":
    main()
