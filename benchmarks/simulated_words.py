"""Does the simulator tell the gains of SmolLM2 with a drafter? The pairs of word problems say.

    python benchmarks/simulated_words.py

Reads the runs that `python benchmarks/e2e/run.py words` left (runs/e2e/words) and its result. The
runs without speculation and with a fixed strategy calibrate the simulator. It then predicts the
speed-up over no speculation of every arm that it knows, from settings and response lengths. Writes
results/simulated_words.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import ROOT, load, save
from tlt.config.load import apply_overrides, check
from tlt.report.view import look_at
from tlt.simulate.calibrate import calibrate
from tlt.simulate.scenario import ScenarioConfig, simulate

RUNS = ROOT / "runs" / "e2e" / "words"
MODES = {"ngram": "ngram", "fixed": "static", "frozen": "frozen", "tlt": "tlt"}
"""Mode of the simulator, by arm."""
CALIBRATING = ("off", "fixed", "ngram")
MEASURES = {"end_to_end": "time/step_s", "rollout": "time/rollout_s"}


def run_of(doc: dict[str, Any], arm: str) -> Path:
    """Return the folder of an arm's run; of the reference, the first one."""
    number = next(n for n, group in enumerate(doc["groups"]) if arm in group["arms"])
    return RUNS / f"{number}-{arm}"


def main() -> None:
    measured = load("e2e/pairs/words")
    calibration = RUNS / "calibration.json"
    calibrate([look_at(run_of(measured, arm)) for arm in CALIBRATING]).save(calibration)
    steps = measured["scenario"]["steps"] + measured["scenario"]["warm_up"]
    settings = [
        f"num_steps={steps}",
        f"modes={json.dumps(['off', *MODES.values()])}",
        "draft_tokens=[1, 2, 3]",
        'static_drafter="eagle3"',
        "static_draft_tokens=3",
        "cluster.num_engines=2",
        f'cluster.calibration="{calibration}"',
        "workload.prompts_per_step=4",
        "workload.group_size=4",
        f'workload.trace="{run_of(measured, "off") / "lengths.jsonl"}"',
    ]
    records = simulate(check(ScenarioConfig, apply_overrides({}, settings), "scenario"))

    def total(mode: str, name: str) -> float:
        return float(sum(record[name] for record in records[mode][1:]))

    rows = {
        arm: {
            measure: {
                "measured": measured["speed_up"][arm]["every_pair"][measure],
                "predicted": total("off", name) / total(mode, name),
            }
            for measure, name in MEASURES.items()
        }
        for arm, mode in MODES.items()
    }
    save("simulated_words", {"calibrated_by": CALIBRATING, "arms": rows})
    for arm, row in rows.items():
        for measure, of in row.items():
            print(arm, measure, f"{of['measured']['median']:.2f}", f"{of['predicted']:.2f}")


if __name__ == "__main__":
    main()
