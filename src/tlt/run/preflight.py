"""Everything that can be wrong with a run and be known before an engine starts.

`prepare` reads the config, the model folder and the data, and refuses what cannot work with a
message that names the key or file and a value that works. What it read, it hands on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.rollout.vllm.args import engine_args, max_draft_tokens
from tlt.run.placement import PlacementPlan, plan_placement
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardFunction, RewardPool, reward_function
from tlt.tasks.source import Source, open_source

CHECKED_STEPS = 4
"""Of so many steps the problems are made and measured before the run."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs and what was checked."""

    chat: Chat
    source: Source
    held_out: list[Problem]
    reward: RewardFunction
    engine: EngineConfig
    placement: PlacementPlan


def prepare(config: TrainConfig) -> Prepared:
    model = _read_model(config)
    engine = _engine(config, model)
    plan = plan_placement(config)
    _check_cores(config)
    _check_learner(config)
    _check_capture(config)
    chat = Chat(config.policy.model, "policy.model")
    num_held_out = config.eval.num_problems if config.eval.every_steps else 0
    source = open_source(config.task, config.run.seed, num_held_out)
    held_out = source.held_out(num_held_out) if num_held_out else []
    problems = list(held_out)
    for step in range(1, min(config.run.num_steps, CHECKED_STEPS) + 1):
        problems += source.batch(step, config.sampling.prompts_per_step)
    _check_lengths(config, engine, model, chat, problems)
    reward = reward_function(config.reward.function, config.task.path is not None)
    asyncio.run(_check_reward(config, reward, problems[0]))
    return Prepared(chat, source, held_out, reward, engine, plan)


def _read_model(config: TrainConfig) -> dict[str, Any]:
    folder = Path(config.policy.model)
    try:
        model: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"policy.model = {config.policy.model!r} is not a model folder: config.json is "
            "missing; make one with `tlt models smollm2`, or name a Hugging Face folder"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy.model: {folder / 'config.json'} is not JSON: {error}") from error
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            f"policy.model = {config.policy.model!r} holds no *.safetensors; save the model with "
            "`save_pretrained`"
        )
    if model.get("sliding_window") and model.get("use_sliding_window", True):
        raise ConfigError(
            f"policy.model: {model.get('model_type')} attends in a sliding window, which packed "
            "training rows do not know; use a model with full attention, such as Llama or Qwen2"
        )
    return model


def _engine(config: TrainConfig, model: dict[str, Any]) -> EngineConfig:
    engine = EngineConfig(model=config.policy.model, **config.engine.model_dump())
    args = dict(engine.engine_args)
    given = args.setdefault("dtype", config.policy.dtype)
    if given != config.policy.dtype:
        raise ConfigError(
            f"engine.engine_args.dtype = {given!r} is not policy.dtype = "
            f"{config.policy.dtype!r}; remove it"
        )
    if config.sampling.temperature != 1:
        # Log-probabilities at the temperature that samples, as the learner computes them.
        mode = args.setdefault("logprobs_mode", "processed_logprobs")
        if mode != "processed_logprobs":
            raise ConfigError(
                f"engine.engine_args.logprobs_mode = {mode!r} with sampling.temperature = "
                f"{config.sampling.temperature}: the learner would compare other probabilities; "
                "remove it"
            )
    if engine.num_gpus and config.placement.kind == "colocated":
        args.setdefault("enable_sleep_mode", True)
    if engine.drafter is not None:
        _check_drafter(Path(engine.drafter), model)
    engine = engine.model_copy(update={"engine_args": args})
    engine_args(engine)
    return engine


def _check_drafter(folder: Path, model: dict[str, Any]) -> None:
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"engine.drafter = {str(folder)!r} is not a drafter folder: config.json is missing; "
            "make one with `tlt drafter train`, or leave it out"
        )
    drafter = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "vocab_size"):
        if drafter.get(key) != model.get(key):
            raise ConfigError(
                f"engine.drafter = {str(folder)!r} is a drafter of another model: {key} is "
                f"{drafter.get(key)}, of policy.model {model.get(key)}; train one for this model"
            )


def _check_cores(config: TrainConfig) -> None:
    """Of this machine; clusters are checked when they are asked for places."""
    if config.engine.num_gpus or config.learner.num_gpus:
        return
    cores = len(os.sched_getaffinity(0))
    engines = config.pool.num_engines * config.engine.num_cores
    ranks = config.learner.num_ranks * (config.learner.num_cores or 1)
    separate = config.placement.kind == "separate"
    if engines + (ranks if separate else 0) > cores:
        beside = f" + learner.num_ranks x num_cores ({ranks})" if separate else ""
        raise ConfigError(
            f"pool.num_engines x engine.num_cores ({engines}){beside} is more than this machine's "
            f"{cores} cores; e.g. pool.num_engines = {max(1, cores - separate)}, "
            "engine.num_cores = 1"
        )
    if ranks > cores:
        raise ConfigError(
            f"learner.num_ranks x learner.num_cores = {ranks} is more than this machine's {cores} "
            f"cores; e.g. learner.num_ranks = 1, learner.num_cores = {cores}"
        )


def _check_learner(config: TrainConfig) -> None:
    updates, prompts = config.learner.updates_per_step, config.sampling.prompts_per_step
    if updates > prompts:
        raise ConfigError(
            f"learner.updates_per_step = {updates} is more than sampling.prompts_per_step = "
            f"{prompts}: an update needs a group; e.g. learner.updates_per_step = 1"
        )


def _check_capture(config: TrainConfig) -> None:
    if not config.capture.enabled:
        return
    folder = Path(config.capture.folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"capture.folder = {str(folder)!r} is not a folder that can be written; e.g. '/dev/shm'"
        )
    free = shutil.disk_usage(folder).free / 2**30
    if config.capture.capacity_gib > free:
        raise ConfigError(
            f"capture.capacity_gib = {config.capture.capacity_gib:g} is more than the {free:.1f} "
            f"GiB free in {folder}; e.g. {max(free / 2, 0.01):.2f}"
        )


def _check_lengths(
    config: TrainConfig,
    engine: EngineConfig,
    model: dict[str, Any],
    chat: Chat,
    problems: list[Problem],
) -> None:
    limit = engine.engine_args.get("max_model_len") or model.get("max_position_embeddings")
    if limit is None:
        return
    drafts = max_draft_tokens(engine)
    margin = drafts + 1 if drafts else 0
    longest, problem_id = max((len(chat.prompt(p.question)), p.problem_id) for p in problems)
    needed = longest + config.sampling.max_tokens + margin
    if needed > limit:
        raise ConfigError(
            f"engine.engine_args.max_model_len = {limit} is too short: prompt of {problem_id} "
            f"({longest} tokens) + sampling.max_tokens ({config.sampling.max_tokens}) + {margin} "
            f"for drafts is {needed}; set it to {needed} or more, or lower sampling.max_tokens"
        )


async def _check_reward(config: TrainConfig, function: RewardFunction, problem: Problem) -> None:
    """Score one response as the run will: in a process, under the time limit."""
    pool = RewardPool(function, 1, config.reward.timeout_s)
    try:
        reward = await pool.score(problem, problem.answer)
    finally:
        pool.close()
    if reward.fault is not None:
        raise ConfigError(
            f"reward.function = {config.reward.function!r} fails on the first problem "
            f"({reward.fault}): {reward.detail}; it must return a finite number, e.g. 1.0, within "
            f"reward.timeout_s = {config.reward.timeout_s:g}"
        )
