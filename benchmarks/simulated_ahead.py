"""What would look-ahead bring on many GPUs, by the length of responses and the size of updates?

    python benchmarks/simulated_ahead.py

Modelled: rollouts of the simulator with 16 samples an engine in groups of 16. Prompts come again in
every RL step, so the longest responses are known. Engines are H100s with a 7B policy, a frozen
drafter and the adaptive strategy, with and without `pool.look_ahead`. Nothing else uses idle time.
`agreement` is the share of tokens that the policy draws again after an update. Writes
results/simulated_ahead.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tlt.config.load import apply_overrides, check
from tlt.observe.provenance import provenance
from tlt.simulate.scenario import ScenarioConfig, simulate

RESULT = Path(__file__).parent / "results" / "simulated_ahead.json"
STEPS = {8: 9, 64: 5, 512: 3}
"""RL steps by number of GPUs. Nothing is known in the first, and nothing was generated ahead."""
SAMPLES, GROUP = 16, 16
LENGTHS = {
    "short": "{median=250, p95=1200, longest=3276}",
    "long": "{median=2500, p95=12000, longest=32768}",
}
AGREEMENTS = (0.998, 0.999, 0.9999)


def rollout_s(settings: list[str]) -> float:
    config = check(ScenarioConfig, apply_overrides({}, settings), "scenario")
    records = simulate(config)["frozen"]
    return statistics.fmean(record["time/rollout_s"] for record in records[1:])


def main() -> None:
    found: list[dict[str, Any]] = []
    for gpus, steps in STEPS.items():
        for name, lengths in LENGTHS.items():
            settings = [
                'cluster.model="qwen2.5-7b"',
                'modes=["frozen"]',
                f"num_steps={steps}",
                f"cluster.num_engines={gpus}",
                'cluster.dispatch="longest_first"',
                f"workload.prompts_per_step={gpus * SAMPLES // GROUP}",
                f"workload.group_size={GROUP}",
                f"workload.lengths={lengths}",
                "workload.epoch_steps=1",
                "drafter.drift=0",
            ]
            without_s = rollout_s(settings)
            for agreement in AGREEMENTS:
                ahead = ["cluster.look_ahead=true", f"cluster.agreement={agreement}"]
                speed_up = without_s / rollout_s([*settings, *ahead])
                found.append(
                    {
                        "gpus": gpus,
                        "lengths": name,
                        "agreement": agreement,
                        "rollout_s": without_s,
                        "speed_up": speed_up,
                    }
                )
                print(
                    f"{gpus:4} GPUs, {name:5} responses, {agreement}: {speed_up:.3f}x", flush=True
                )
    RESULT.write_text(
        json.dumps({"provenance": provenance(), "lengths": LENGTHS, "found": found}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
