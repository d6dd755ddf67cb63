"""Is a model trained with TLT as good as one without? The tiny recipe, both ways, several seeds.

    python benchmarks/quality.py [--seeds 3] [--steps 60]

The test, stated beforehand: a run's figure is its mean reward over all steps, which is higher the
sooner it learns. The two sets of seeds differ if Welch's t-test says so at p < 0.05; and the 90%
interval of the difference says how large a difference could have gone unnoticed. Needs
models/tiny-sft (see configs/tiny_gcd_cpu.toml). Writes results/quality.json and .png.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance
from tlt.observe.record import read

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "quality.json"
ARMS = {"off": "tlt.enabled=false", "tlt": "tlt.enabled=true"}


def run(arm: str, seed: int, steps: int) -> dict[str, list[float]]:
    out = ROOT / "runs" / "quality" / f"{arm}-{seed}-{steps}"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "tlt", "train", "configs/tiny_gcd_cpu.toml"]
        command += [f'run.out="{out}"', f"run.seed={seed}", f"run.num_steps={steps}", ARMS[arm]]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = read(out / "metrics.jsonl")
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


def mean_rewards(runs: list[dict[str, list[float]]]) -> list[float]:
    """Return the mean reward of every run."""
    return [statistics.fmean(found["rewards"]) for found in runs]


def plot(runs: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    from canvas import pyplot
    from tlt.colours import MODES

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for arm, colour in ((arm, MODES[arm]) for arm in runs):
        curves = [found["rewards"] for found in runs[arm]]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, lw=1)
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(means) + 1), means, color=colour, lw=2, label=arm)
    axis.set_xlabel("RL step")
    axis.set_ylabel("mean reward")
    found = compared(*(mean_rewards(runs[arm]) for arm in ("off", "tlt")))
    differ = "differ" if found["p"] < 0.05 else "do not differ significantly"
    figure.suptitle(f"Rewards with and without TLT {differ} (p = {found['p']:.2f})")
    axis.set_title(f"tiny recipe, {len(curves)} seeds each (thin), and their mean")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


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
    for name, figure in {
        "mean_reward": lambda found: statistics.fmean(found["rewards"]),
        "last_held_out": lambda found: found["held_out"][-1],
    }.items():
        off, tlt = ([figure(found) for found in runs[arm]] for arm in ("off", "tlt"))
        result[name] = {"off": off, "tlt": tlt, **compared(off, tlt)}
    result["acceptance_length"] = statistics.fmean(
        value for found in runs["tlt"] for value in found["acceptance"] if math.isfinite(value)
    )
    result["runs"] = runs
    RESULT.write_text(json.dumps({"provenance": provenance()} | result, indent=2) + "\n")
    plot(runs, RESULT.with_suffix(".png"))
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}, indent=2))


if __name__ == "__main__":
    main()
