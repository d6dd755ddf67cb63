"""Settings of a run, with as little as a run needs."""

from typing import Any

from tlt.config.train import TrainConfig

REQUIRED: dict[str, dict[str, Any]] = {
    "run": {"out": "out", "num_steps": 1},
    "policy": {"model": "model", "dtype": "float32"},
    "task": {"name": "gcd"},
    "sampling": {"prompts_per_step": 4, "group_size": 2, "max_tokens": 8},
}


def small_run(**sections: dict[str, Any]) -> TrainConfig:
    """Return the settings with these in place of the required ones, section by section."""
    tree = {key: REQUIRED.get(key, {}) | sections.get(key, {}) for key in {*REQUIRED, *sections}}
    return TrainConfig.model_validate(tree)
