"""Recipes learn on two cores: rewards by RL step, and how idle the engines were.

    python benchmarks/recipes.py                # all of them
    python benchmarks/recipes.py --only lora    # one again

Makes the models that are missing in models/, and writes results/recipes.json with a picture of each
curve. `fixed` is DAPO's recipe without the extra prompts that replace groups without a signal.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, load, parse_options, save, trained
from tlt.observe.record import read
from tlt.observe.summary import series, summary
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
        "SmolLM2 with a calculator",
        str(AGENT / "smollm2.toml"),
        ["policy.model=models/smollm2-calculator"],
    ),
}
"""Label, file and settings of each recipe."""
TINY = {
    "models/tiny": "tiny",
    "models/tiny-sft": "sft --model models/tiny --task gcd --sizes 2,2,2 --parameter max_value=9 "
    "--steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32",
}
SMOLLM2 = {
    "models/smollm2": "smollm2",
    "models/smollm2-calculator": "sft --model models/smollm2 --task word_problems --sizes 2,3,4 "
    "--environment calculator:Calculator --steps 22 --lr 2e-4 --dtype float32",
}


def make_models(name: str) -> None:
    """Make the models of a recipe that are missing, as the head of its file says."""
    for folder, how in (SMOLLM2 if name == "agent" else TINY).items():
        if not (ROOT / folder).exists():
            command = [sys.executable, "-m", "tlt", "models", *how.split(), "--out", folder]
            subprocess.run(command, cwd=ROOT, check=True)


def curve(run: Path) -> dict[str, Any]:
    """Return what a finished run learned, and how idle its engines were."""
    records = read(run / "metrics.jsonl")
    found = summary(records)
    means = {
        name: statistics.fmean(values)
        for name in ("rollout/idle_share", "rollout/replacement_share")
        if (values := series(records, name)[1])
    }
    return {
        "rewards": [round(reward, 4) for reward in series(records, "reward/mean")[1]],
        "first": found["reward"]["first_fifth"],
        "last": found["reward"]["last_fifth"],
        "held_out": series(records, "eval/reward_mean")[1],
        "minutes": found["total"]["time/step_s"] / 60,
        **means,
    }


def main() -> None:
    options = parse_options(__doc__, only=list(RECIPES))
    os.environ["PYTHONPATH"] = str(AGENT)
    done = load("recipes").get("recipes", {})
    for name in options.only:
        make_models(name)
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
