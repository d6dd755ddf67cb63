"""The scenario of a `tlt train` recipe: its cluster, samples, draft lengths and modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlt.config.load import apply_overrides, check
from tlt.config.train import TrainConfig, transfer
from tlt.errors import ConfigError
from tlt.simulate.scenario import LearnerSection, ScenarioConfig, WorkloadConfig
from tlt.strategy.spec import build_strategy
from tlt.timing.profiles import (
    GPUS_PER_NODE,
    MODELS,
    NEW_DRAFTER,
    training_speed,
    update_fixed_s,
)

Tree = dict[str, Any]

NGRAMS = ["off", "static", "ngram"]
FROM_NOTHING = ["off", "static", "ngram", "tlt"]
"""Modes of a recipe without a drafter: all but `tlt` draft by n-grams."""


def scenario_tree(tree: Tree, changes: Sequence[str], where: str, num_gpus: int | None) -> Tree:
    """Return the settings of a scenario: a file's, or made of a recipe, with the changes.

    A change of a setting that recipes have, such as `sampling.max_tokens`, is one of the recipe.
    """
    if num_gpus is not None and "cluster.num_engines" in map(_key, changes):
        raise ConfigError(
            "--gpus and cluster.num_engines both set the number of engines; give one of them"
        )
    recipe = None
    if "policy" in tree or "sampling" in tree:
        own = [change for change in changes if _is_of_recipe(_key(change))]
        changes = [change for change in changes if change not in own]
        recipe = check(TrainConfig, apply_overrides(tree, own), where)
        tree = _of_recipe(recipe, num_gpus)
        if num_gpus is not None:
            num_gpus = tree["cluster"]["num_engines"] * tree["cluster"]["tensor_parallel"]
    found = apply_overrides(tree, changes)
    cluster = check(ScenarioConfig, found, where).cluster
    if num_gpus is not None:
        engines = _engines(num_gpus, cluster.tensor_parallel)
        found.setdefault("cluster", {})["num_engines"] = engines
    if recipe is None:
        return found
    if cluster.calibration is not None:
        for name in ("tokens_per_s", "step_s"):
            if f"learner.{name}" not in map(_key, changes):
                found.get("learner", {}).pop(name, None)  # as calibrated
        return found
    if found["modes"] == NGRAMS:
        raise ConfigError(
            f"{where} drafts by n-grams only, and a policy's acceptance of these is not "
            "known without a run; give the result of `tlt simulate calibrate` as "
            "cluster.calibration=calibration.json, or a drafter's folder as engine.drafter"
        )
    if found["modes"] == FROM_NOTHING:
        # How many n-grams a policy accepts is not known without a run.
        found["modes"] = ["off", "tlt"]
        found.pop("static_drafter")
    if "model" not in found["cluster"]:
        raise ConfigError(
            f"{where}: policy.model = {recipe.policy.model!r} is not a modelled policy "
            f"({', '.join(MODELS)}); measure a run of it with `tlt simulate calibrate` and give "
            "cluster.calibration=calibration.json, or name a similar one, e.g. "
            "cluster.model=qwen2.5-7b"
        )
    return found


def _of_recipe(recipe: TrainConfig, num_gpus: int | None) -> Tree:
    cluster, rank_gpus = _cluster(recipe, num_gpus)
    found: Tree = {
        "seed": recipe.run.seed,
        "cluster": cluster,
        "workload": {
            "prompts_per_step": recipe.sampling.prompts_per_step,
            "group_size": recipe.sampling.group_size,
            "lengths": _lengths(recipe),
        },
    }
    if rank_gpus and "model" in cluster:
        own = (cluster["model"], rank_gpus)
        found["learner"] = {
            "tokens_per_s": training_speed(*own),
            "step_s": update_fixed_s(*own, cluster.get("gpus_per_node", GPUS_PER_NODE)),
        }
    strategy = recipe.engine.strategy
    arms = build_strategy(strategy).arms() if "arms" in strategy else frozenset()
    if drafted := sorted({arm.num_draft_tokens for arm in arms} - {0}):
        found["draft_tokens"] = drafted
    found["tlt"] = recipe.tlt.model_dump(exclude_unset=True)
    if recipe.engine.drafter is not None:
        found["modes"] = ["off", "static", "frozen", *["tlt"] * recipe.tlt.harvest]
        return found
    found |= {"modes": list(NGRAMS), "static_drafter": "ngram"}
    if recipe.tlt.harvest:
        # Both relative to a trained drafter, which calibrated rates stand for, too.
        drafter = {"start_power": NEW_DRAFTER, "best_power": 1.0}
        found |= {"modes": list(FROM_NOTHING), "drafter": drafter}
    return found


def _cluster(recipe: TrainConfig, num_gpus: int | None) -> tuple[Tree, int]:
    """Return the cluster, and the GPUs that only the learner has."""
    engine, num_engines = recipe.engine, recipe.pool.num_engines
    parallel = max(1, engine.num_gpus)
    colocated = recipe.placement.kind == "colocated"
    rank_gpus = 0 if colocated else recipe.learner.num_ranks * recipe.learner.num_gpus
    if num_gpus is not None:
        if engine.num_gpus == 0:
            raise ConfigError(
                "--gpus: engine.num_gpus = 0 makes CPU engines; give cluster.num_engines=8, or "
                "engine.num_gpus=1"
            )
        own = num_engines * parallel
        num_engines = _engines(num_gpus * own // (own + rank_gpus), parallel)
        if rank_gpus:
            rank_gpus = num_gpus - num_engines * parallel
    # The modelled policy that a folder or Hub id names.
    model = next((name for name in MODELS if name in recipe.policy.model.lower()), None)
    found = {
        "num_engines": num_engines,
        "tensor_parallel": parallel,
        "gpus_per_node": recipe.node.num_gpus,
        "transport": transfer(recipe),
        "slots": engine.engine_args.get("max_num_seqs"),
        "model": model if engine.num_gpus else None,
    }
    return {key: value for key, value in found.items() if value is not None}, rank_gpus


def _lengths(recipe: TrainConfig) -> Tree:
    """Return forced lengths, or assumed ones that end at the recipe's longest response."""
    if recipe.debug.forced_lengths is not None:
        return recipe.debug.forced_lengths.model_dump()
    assumed, longest = WorkloadConfig().lengths, recipe.sampling.max_tokens
    shrink = min(1.0, longest / assumed.p95)
    median = max(1.0, assumed.median * shrink)
    return {"median": median, "p95": assumed.p95 * shrink, "longest": longest}


def _key(change: str) -> str:
    """Return what a change such as `cluster.num_engines=8` sets."""
    return change.partition("=")[0].strip()


def _is_of_recipe(key: str) -> bool:
    """Say whether a recipe has this setting, and a scenario has not."""
    section, _, name = key.partition(".")
    if section == "learner":
        return bool(name) and name not in LearnerSection.model_fields
    return section == "tlt" or section not in ScenarioConfig.model_fields


def _engines(num_gpus: int, parallel: int) -> int:
    if num_gpus < parallel:
        raise ConfigError(
            f"--gpus: {num_gpus} GPUs are too few for an engine of {parallel}; e.g. --gpus "
            f"{8 * parallel}"
        )
    return num_gpus // parallel
