"""Does the simulator tell the truth? Calibrated by some runs, it predicts others.

    python benchmarks/simulator.py [--steps 6]

All runs are of configs/tiny_tail_cpu.toml on this machine: four to calibrate by, and others with
other batches, lengths and ways to decode, which the calibration has not seen. Compared are the mean
seconds of a rollout and of a step, without the first step. A run that is complete in runs/simulator
is not run again. Needs models/tiny-sft (see the recipe). Writes results/simulator.json and .png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tlt.config.load import apply_overrides, check
from tlt.observe.report import look_at
from tlt.simulate.calibrate import calibrate
from tlt.simulate.scenario import ScenarioConfig, simulate

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "simulator"
RESULT = Path(__file__).parent / "results" / "simulator.json"

LENGTHS = {
    "tail": (30, 600, 1800),
    "short": (20, 200, 600),
    "heavy": (40, 1200, 1800),
    "even": (200, 250, 300),
}
MODES = {
    "off": (["engine.policy={kind='off'}"], ['modes=["off"]']),
    "ngram2": (
        ["engine.policy={kind='fixed', drafter='ngram', num_draft_tokens=2}"],
        ['modes=["static"]', 'static_drafter="ngram"', "static_draft_tokens=2"],
    ),
    "ngram6": (
        ["engine.policy={kind='fixed', drafter='ngram', num_draft_tokens=6}"],
        ['modes=["static"]', 'static_drafter="ngram"', "static_draft_tokens=6"],
    ),
    "adaptive": (
        ["tlt.enabled=true", "tlt.harvest='off'"],
        ['modes=["ngram"]', "draft_tokens=[2, 4, 8]"],
    ),
}
CALIBRATION = [("tail", 8, "off"), ("tail", 8, "ngram2"), ("tail", 8, "ngram6"), ("even", 8, "off")]
PREDICTED = [
    ("tail", 8, "adaptive"),
    ("tail", 4, "off"),
    ("tail", 16, "off"),
    ("tail", 16, "adaptive"),
    ("short", 8, "off"),
    ("short", 8, "ngram2"),
    ("short", 16, "ngram6"),
    ("short", 16, "adaptive"),
    ("heavy", 4, "off"),
    ("heavy", 4, "adaptive"),
    ("heavy", 8, "ngram6"),
    ("even", 4, "off"),
    ("even", 8, "adaptive"),
    ("even", 16, "off"),
]


def run(case: tuple[str, int, str], steps: int) -> Path:
    lengths, prompts, mode = case
    out = RUNS / f"{lengths}-{prompts}-{mode}"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        median, p95, longest = LENGTHS[lengths]
        command = [sys.executable, "-m", "tlt", "train", "configs/tiny_tail_cpu.toml"]
        command += [f'run.out="{out}"', f"run.num_steps={steps}"]
        command += [f"sampling.prompts_per_step={prompts}", *MODES[mode][0]]
        command += [
            f"sampling.forced_lengths={{median={median}, p95={p95}, longest={longest}}}",
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out


def predicted(case: tuple[str, int, str], steps: int, calibration: Path) -> list[dict[str, float]]:
    lengths, prompts, mode = case
    out = RUNS / f"{lengths}-{prompts}-{mode}"
    settings = [
        f"num_steps={steps}",
        "cluster.num_engines=2",
        f'cluster.calibration="{calibration}"',
        f"workload.prompts_per_step={prompts}",
        "workload.group_size=8",
        f'workload.trace="{out / "lengths.jsonl"}"',
        *MODES[mode][1],
    ]
    config = check(ScenarioConfig, apply_overrides({}, settings), "scenario")
    return next(iter(simulate(config).values()))


def mean(records: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(record[name] for record in records[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = calibrate([look_at(run(case, options.steps)) for case in CALIBRATION])
    RUNS.mkdir(parents=True, exist_ok=True)
    found.save(RUNS / "calibration.json")
    rows: list[dict[str, Any]] = []
    for case in PREDICTED:
        measured = look_at(run(case, options.steps)).records
        simulated = predicted(case, options.steps, RUNS / "calibration.json")
        row: dict[str, Any] = {"run": "-".join(map(str, case))}
        for name in ("rollout", "step"):
            mine, theirs = mean(simulated, f"time/{name}_s"), mean(measured, f"time/{name}_s")
            row |= {
                f"{name}_s": theirs,
                f"{name}_predicted_s": mine,
                f"{name}_error": mine / theirs - 1,
            }
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    result: dict[str, Any] = {"steps": options.steps, "runs": rows}
    for name in ("rollout", "step"):
        errors = [abs(row[f"{name}_error"]) for row in rows]
        result[name] = {"median_error": statistics.median(errors), "worst_error": max(errors)}
        print(name, result[name])
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
