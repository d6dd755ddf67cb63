"""Is a model trained with TLT as good as one without? The tiny recipe, both ways, several seeds.

    python benchmarks/quality.py [--seeds 3] [--steps 60]

The test, stated beforehand: a run's figure is its mean reward over all steps, which is higher the
sooner it learns. The two sets of seeds differ if Welch's t-test says so at p < 0.05; and the 90%
interval of the difference says how large a difference could have gone unnoticed. Needs
models/tiny-sft (see configs/tiny_gcd_cpu.toml). Writes results/quality.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from common import ROOT, save, trained
from tlt.observe.record import read

ARMS = {"off": "tlt.enabled=false", "tlt": "tlt.enabled=true"}
FIGURES = {
    "mean_reward": lambda found: statistics.fmean(found["rewards"]),
    "last_held_out": lambda found: found["held_out"][-1],
}


def run(arm: str, seed: int, steps: int) -> dict[str, list[float]]:
    out = ROOT / "runs" / "quality" / f"{arm}-{seed}-{steps}"
    settings = (f"run.seed={seed}", f"run.num_steps={steps}", ARMS[arm])
    records = read(trained(out, "configs/tiny_gcd_cpu.toml", *settings) / "metrics.jsonl")
    return {
        "rewards": [r["reward/mean"] for r in records if "reward/mean" in r],
        "held_out": [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r],
        "acceptance": [r["rollout/acceptance_length"] for r in records if "reward/mean" in r],
    }


def compared(off: list[float], tlt: list[float]) -> dict[str, float]:
    """Welch's t-test, and the 90% interval of the difference of means."""
    from scipy import stats

    test = stats.ttest_ind(tlt, off, equal_var=False)
    interval = test.confidence_interval(0.90)
    return {
        "difference": statistics.fmean(tlt) - statistics.fmean(off),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test.pvalue),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for arm in ARMS:
            runs[arm].append(run(arm, seed, options.steps))
            print(arm, seed, f"{statistics.fmean(runs[arm][-1]['rewards']):.4f}", flush=True)
    result: dict[str, Any] = {"seeds": options.seeds, "steps": options.steps}
    for name, figure in FIGURES.items():
        off, tlt = ([figure(found) for found in runs[arm]] for arm in ("off", "tlt"))
        result[name] = {"off": off, "tlt": tlt, **compared(off, tlt)}
        print(name, result[name])
    result["acceptance_length"] = statistics.fmean(
        value for found in runs["tlt"] for value in found["acceptance"] if math.isfinite(value)
    )
    save("quality", result | {"runs": runs})


if __name__ == "__main__":
    main()
