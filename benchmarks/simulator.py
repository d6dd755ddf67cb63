"""Does the simulator tell the truth? Calibrated by some runs, it predicts others.

    python benchmarks/simulator.py [--steps 6]

All runs are of configs/tiny_tail_cpu.toml on this machine: four to calibrate by, before and again
after the others, as the machine's speed drifts; and runs with other batches, lengths and ways to
decode, which the calibration has not seen. Compared are the mean seconds of a rollout and of a
step, without the first step; also with the calibration's engine made as fast, by one factor, as
the run's engine steps were, which leaves out what the machine's speed adds. A run that is complete
in runs/simulator is not run again. Needs models/tiny-sft (see the recipe). Writes
results/simulator.json.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, parse_options, save, trained
from tlt.config.load import apply_overrides, check
from tlt.report.view import RunView, look_at
from tlt.simulate.calibrate import Calibration, calibrate, observations
from tlt.simulate.scenario import ScenarioConfig, simulate
from tlt.timing.model import PARTS, EngineModel

RUNS = ROOT / "runs" / "simulator"

LENGTHS = {
    "tail": (30, 600, 1800),
    "short": (20, 200, 600),
    "heavy": (40, 1200, 1800),
    "even": (200, 250, 300),
}
MODES = {
    "off": (["engine.strategy={kind='off'}"], ['modes=["off"]']),
    "ngram2": (
        ["engine.strategy={kind='fixed', drafter='ngram', num_draft_tokens=2}"],
        ['modes=["static"]', 'static_drafter="ngram"', "static_draft_tokens=2"],
    ),
    "ngram6": (
        ["engine.strategy={kind='fixed', drafter='ngram', num_draft_tokens=6}"],
        ['modes=["static"]', 'static_drafter="ngram"', "static_draft_tokens=6"],
    ),
    "adaptive": (
        ["tlt.enabled=true", "tlt.harvest=false"],
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


Case = tuple[str, int, str]


def folder(case: Case, turn: str = "") -> Path:
    return RUNS / ("-".join(map(str, case)) + turn)


def run(case: Case, steps: int, turn: str = "") -> Path:
    lengths, prompts, mode = case
    median, p95, longest = LENGTHS[lengths]
    return trained(
        folder(case, turn),
        "configs/tiny_tail_cpu.toml",
        f"run.num_steps={steps}",
        f"sampling.prompts_per_step={prompts}",
        f"debug.forced_lengths={{median={median}, p95={p95}, longest={longest}}}",
        *MODES[mode][0],
    )


def predicted(case: Case, steps: int, calibration: Path) -> list[dict[str, float]]:
    _, prompts, mode = case
    settings = [
        f"num_steps={steps}",
        "cluster.num_engines=2",
        f'cluster.calibration="{calibration}"',
        f"workload.prompts_per_step={prompts}",
        "workload.group_size=8",
        f'workload.trace="{folder(case) / "lengths.jsonl"}"',
        *MODES[mode][1],
    ]
    config = check(ScenarioConfig, apply_overrides({}, settings), "scenario")
    return next(iter(simulate(config).values()))


def mean(records: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(record[name] for record in records[1:])


def slowness(view: RunView, engine: EngineModel) -> float:
    """How much longer the run's engine steps took than modelled: 1 on a machine that stays as it
    was when the calibration was made."""
    found = observations(view)
    modelled = [o.weight * engine.step_s(o.arm, o.running, o.context) / o.step_s for o in found]
    return sum(o.weight for o in found) / float(sum(modelled))


def slowed(found: Calibration, by: float) -> Calibration:
    parts = {part: getattr(found.engine, part) * by for part in PARTS}
    speed = found.engine.prefill_tokens_per_s / by
    return replace(found, engine=replace(found.engine, **parts, prefill_tokens_per_s=speed))


def main() -> None:
    options = parse_options(__doc__, steps=6)
    steps = options.steps
    known = [run(case, steps, "-before") for case in CALIBRATION]
    seen = [run(case, steps) for case in PREDICTED]
    known += [run(case, steps, "-after") for case in CALIBRATION]
    found = calibrate(list(map(look_at, known)))
    found.save(RUNS / "calibration.json")
    rows: list[dict[str, Any]] = []
    for case, out in zip(PREDICTED, seen, strict=True):
        view = look_at(out)
        by = slowness(view, found.engine)
        row: dict[str, Any] = {"run": out.name, "slowness": by}
        for name in ("rollout", "step"):
            row[f"{name}_s"] = mean(view.records, f"time/{name}_s")
        slowed(found, by).save(RUNS / "same_speed.json")
        for kind, file in {"": "calibration.json", "_same_speed": "same_speed.json"}.items():
            simulated = predicted(case, steps, RUNS / file)
            for name in ("rollout", "step"):
                seconds = mean(simulated, f"time/{name}_s")
                row[f"{name}_predicted{kind}_s"] = seconds
                row[f"{name}_error{kind}"] = seconds / row[f"{name}_s"] - 1
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    result: dict[str, Any] = {"steps": steps, "runs": rows}
    for name in ("rollout", "step"):
        for kind in ("", "_same_speed"):
            errors = [abs(row[f"{name}_error{kind}"]) for row in rows]
            result[name + kind] = {
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
            }
            print(name + kind, result[name + kind])
    save("simulator", result)


if __name__ == "__main__":
    main()
