"""Recipes learn on two cores: rewards by RL step, and how idle the engines were.

    python benchmarks/recipes.py                # all of them
    python benchmarks/recipes.py --only lora    # one again

Makes the models that are missing in models/, and writes results/recipes.json with a picture of each
curve. `fixed` is DAPO's recipe without the extra prompts that replace groups without a signal.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, load, parse_options, save, trained
from tlt.report.charts import charts_of
from tlt.report.svg import sheet
from tlt.report.view import look_at

AGENT = ROOT / "examples" / "calculator_agent"
RECIPES: dict[str, tuple[str, str, list[str]]] = {
    "dapo": ("DAPO on a tiny model", "configs/dapo_tiny_cpu.toml", []),
    "fixed": (
        "the same without extra prompts",
        "configs/dapo_tiny_cpu.toml",
        ["sampling.max_extra_prompts=0"],
    ),
    "lora": ("LoRA on a tiny model", "configs/lora_tiny_cpu.toml", []),
    "agent": (
        "an agent with a calculator, tiny model",
        f"{AGENT.relative_to(ROOT)}/run.toml",
        ["run.num_steps=40"],
    ),
}
"""Label, file and settings of each recipe."""
MODELS = {
    "models/tiny": "tiny",
    "models/tiny-sft": "sft --model models/tiny --task gcd --sizes 2,2,2 --parameter max_value=9 "
    "--steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32",
    "models/tiny-calls": "sft --model models/tiny --task word_problems --sizes 2,3,4 "
    "--environment calculator:Calculator --steps 150 --row-tokens 4096 --lr 2e-3 --dtype float32",
}


def make_models() -> None:
    """Make the models that are missing, as the heads of the recipes say."""
    for folder, how in MODELS.items():
        if not (ROOT / folder).exists():
            command = [sys.executable, "-m", "tlt", "models", *how.split(), "--out", folder]
            subprocess.run(command, cwd=ROOT, check=True)


def curve(run: Path) -> dict[str, Any]:
    """Return what a finished run learned, and how idle its engines were."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    fifth = max(1, len(steps) // 5)
    rewards = [record["reward/mean"] for record in steps]
    kept = ("rollout/idle_share", "rollout/replacement_share", "tools/turns_mean")
    return {
        "rewards": [round(reward, 4) for reward in rewards],
        "first": statistics.fmean(rewards[:fifth]),
        "last": statistics.fmean(rewards[-fifth:]),
        "held_out": [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r],
        "minutes": sum(record["time/step_s"] for record in records) / 60,
        **{key: statistics.fmean(s[key] for s in steps) for key in kept if key in steps[0]},
    }


def main() -> None:
    options = parse_options(__doc__, only=list(RECIPES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(AGENT), os.environ.get("PYTHONPATH", "")])
    make_models()
    done = load("recipes").get("recipes", {})
    for name in options.only:
        label, config, settings = RECIPES[name]
        run = trained(ROOT / "runs" / "recipes" / name, config, *settings)
        done[name] = {"label": label} | curve(run)
        (found,) = charts_of([look_at(run)])
        picture = RESULTS / "recipes" / f"{name}.svg"
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(sheet(label, [found["reward"]]))
        save("recipes", {"recipes": done})


if __name__ == "__main__":
    main()
