"""Checks of a run before any engine starts.

`prepare` reads the config, the model folder and the data. It refuses what cannot work, with a
message that names the key or file and a value that works, and returns what it read.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.agents.check import described_tools, try_environment
from tlt.agents.scoring import state_reward
from tlt.config.rollout import EngineConfig, EngineSettings
from tlt.config.train import TrainConfig, transfer
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.speculators import plain_config
from tlt.errors import ConfigError
from tlt.hardware import Machine, this_machine
from tlt.models.folder import SHAPE_KEYS, check_drafter, is_outline, read_model, read_settings
from tlt.node.shared import remove_abandoned
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import HeldOut, held_out_sets
from tlt.tasks.rewards import RewardFunction, RewardPool, reward_function
from tlt.tasks.source import Source, open_source
from tlt.train.check_update import check_algorithm, check_learner, check_lora
from tlt.train.fit import check_memory
from tlt.train.memory import GIB, Place, Sizes
from tlt.train.placement import PlacementPlan, plan_placement
from tlt.vllm.args import engine_args, max_draft_tokens
from tlt.vllm.environment import RUNNER_VARIABLE

CHECKED_STEPS = 4
"""Number of first RL steps whose problems are made and measured before the run."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of models with experts."""

MIN_CAPTURED_LAYERS = 3
"""Number of layers whose hidden states EAGLE-3 fuses."""

PROMPT_TOKENS = 2048
"""Prompt tokens that a model folder without tokenizer is planned for, unless `max_model_len` says
more."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the checks read and the run needs."""

    chat: Chat
    source: Source
    held_out: list[HeldOut]
    """The sets that the run evaluates."""
    reward: RewardFunction
    engine: EngineConfig
    placement: PlacementPlan
    memory: list[Place]
    max_prompt_tokens: int
    """Longest prompt that leaves room for a response and its drafts in the model's context."""
    tool_schemas: list[dict[str, Any]]
    """The tools of the run's environment; none without one."""


def check_outline(config: TrainConfig) -> list[Place] | None:
    """Check a run whose model folder holds only a config.json, and return its memory plan.

    Tokenizer, weights, data and reward are not checked. Return None for any other model folder.
    """
    folder = Path(config.policy.model)
    if not is_outline(folder):
        return None
    model = read_settings(folder, "policy.model", "name a model folder")
    _check_experts(model)
    engine, draft_tokens = engine_config(config, model)
    plan_placement(config)
    check_learner(config)
    check_lora(config)
    given = engine.engine_args.get("max_model_len", 0) - draft_tokens - config.sampling.max_tokens
    return _plan_memory(config, model, max(given, PROMPT_TOKENS), draft_tokens)


def prepare(config: TrainConfig) -> Prepared:
    """Check the run and return what it needs; `ConfigError` says what is wrong."""
    model = read_model(Path(config.policy.model), "policy.model")
    if model.get("sliding_window") and model.get("use_sliding_window", True):
        raise ConfigError(
            f"policy.model: {model.get('model_type')} attends in a sliding window, which packed "
            "training rows do not know; use a model with full attention, such as Llama or Qwen2"
        )
    _check_experts(model)
    engine, draft_tokens = engine_config(config, model)
    plan = plan_placement(config)
    _check_emulation(config)
    _check_cores(config)
    check_learner(config)
    check_lora(config)
    check_algorithm(config)
    _check_capture(config, model)
    chat = Chat(config.policy.model, "policy.model")
    num_held_out = config.eval.num_problems if config.eval.every_steps else 0
    source = open_source(config.task, config.run.seed, num_held_out)
    reward = reward_function(config.reward.function, config.task.path is not None)
    held_out = held_out_sets(config, source, reward)
    tools = described_tools(config)
    trained = []
    for step in range(1, min(config.run.num_steps, CHECKED_STEPS) + 1):
        count, num_extra = config.sampling.prompts_per_step, config.sampling.max_extra_prompts
        trained += source.batch(step, count) + source.extra(step, count, num_extra)
    problems = [problem for each in held_out for problem in each.problems] + trained
    prompts = [(chat.prompt(p.question, p.history, tools), p.problem_id) for p in problems]
    longest, room = _check_prompts(config, engine, model, draft_tokens, prompts)
    memory = _plan_memory(config, model, longest, draft_tokens)
    scores = reward
    if tools:
        state, looks = asyncio.run(try_environment(config, chat, trained[0])), state_reward(config)
        scores = scores if looks is None else looks(state)
    asyncio.run(_check_reward(config, held_out, scores, trained[0]))
    return Prepared(chat, source, held_out, reward, engine, plan, memory, room, tools)


def engine_config(config: TrainConfig, model: dict[str, Any]) -> tuple[EngineConfig, int]:
    """Return the settings of the engines, and the longest draft that their strategy makes."""
    engine = EngineConfig(
        model=config.policy.model,
        core_group=config.debug.core_group,
        weights=transfer(config),
        emulate=config.emulate.settings,
        **config.engine.model_dump(),
    )
    args = dict(engine.engine_args)
    given = args.setdefault("dtype", config.policy.dtype)
    if given != config.policy.dtype:
        raise ConfigError(
            f"engine.engine_args.dtype = {given!r} is not policy.dtype = "
            f"{config.policy.dtype!r}; remove it"
        )
    # Log-probabilities at the sampling temperature, as the learner computes them.
    fitting = "raw_logprobs" if config.sampling.temperature == 1 else "processed_logprobs"
    mode = args.setdefault("logprobs_mode", fitting)
    if mode != fitting:
        raise ConfigError(
            f"engine.engine_args.logprobs_mode = {mode!r} with sampling.temperature = "
            f"{config.sampling.temperature}: the learner would compare other probabilities; "
            "remove it"
        )
    if engine.num_gpus and (config.placement.kind == "colocated" or config.tlt.harvests):
        args.setdefault("enable_sleep_mode", True)
    if engine.drafter is not None:
        check_drafter(Path(engine.drafter), model, "engine.drafter")
        if config.tlt.harvests:
            _check_trainable(Path(engine.drafter), model)
    engine = engine.model_copy(update={"engine_args": args})
    checked = engine
    if config.tlt.harvests and engine.drafter is None:
        checked = engine.model_copy(update={"drafter": "made by the run"})
    try:
        engine_args(checked)
        return engine, max_draft_tokens(checked)
    except ConfigError as error:
        raise type(error)(f"engine: {error}") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"engine.strategy = {engine.strategy} cannot be read ({error}); "
            'e.g. { kind = "fixed", drafter = "ngram", num_draft_tokens = 4 }'
        ) from error


def _check_trainable(drafter: Path, model: dict[str, Any]) -> None:
    """Refuse a drafter that engines may load, but trainers do not compute."""
    try:
        said = plain_config(json.loads((drafter / "config.json").read_bytes()))
        Eagle3Config.from_hf(said, model.get("num_hidden_layers"))
    except ConfigError as error:
        raise ConfigError(
            f"engine.drafter = {str(drafter)!r}: {error}; tlt.harvest = false drafts with it as "
            "it is"
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"engine.drafter = {str(drafter)!r}: its config.json is damaged ({error!r}); copy the "
            "drafter again, or leave it out"
        ) from error


def _check_emulation(config: TrainConfig) -> None:
    """Refuse to emulate GPUs on GPUs, on a cluster, or with a learner that has its own."""
    if config.emulate.hardware is None:
        return
    for wrong, what in (
        (config.engine.num_gpus, "engine.num_gpus = 0"),
        (config.learner.num_gpus, "learner.num_gpus = 0"),
        (config.placement.kind != "colocated", "placement.kind = 'colocated'"),
        (os.environ.get("RAY_ADDRESS"), "no RAY_ADDRESS"),
    ):
        if wrong:
            raise ConfigError(
                f"emulate.hardware = {config.emulate.hardware!r} emulates a node on the CPU cores "
                f"of this machine: it needs {what}; leave it out to use the real hardware"
            )


def _check_cores(config: TrainConfig) -> None:
    """Check the cores of this machine; `reserve` checks those of a cluster."""
    if config.engine.num_gpus or config.learner.num_gpus or os.environ.get("RAY_ADDRESS"):
        return
    cores = len(os.sched_getaffinity(0))
    engines = config.pool.num_engines * config.engine.num_cores
    if config.emulate.hardware:
        engines = config.engine.num_cores  # they share the cores, and mostly wait
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


def _check_capture(config: TrainConfig, model: dict[str, Any]) -> None:
    if not config.capture.enabled:
        return
    folder = Path(config.capture.folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"capture.folder = {str(folder)!r} is not a folder that can be written; e.g. '/dev/shm'"
        )
    by_engines = config.capture.by == "engines"
    if by_engines and not config.tlt.harvests:
        raise ConfigError(
            "capture.by = 'engines' needs harvest (tlt.enabled = true), whose drafter makes them "
            "compute these states; e.g. 'learner'"
        )
    if by_engines and config.engine.num_gpus and os.environ.get(RUNNER_VARIABLE, "1") != "1":
        raise ConfigError(
            f"capture.by = 'engines' needs vLLM's V2 runner on GPUs; unset {RUNNER_VARIABLE}, "
            "e.g. 'learner'"
        )
    remove_abandoned(folder)  # leftovers of a killed run take no room from this one
    free = shutil.disk_usage(folder).free / 2**30
    if config.capture.capacity_gib > free and not _has_gpus_elsewhere(config.engine):
        raise ConfigError(
            f"capture.capacity_gib = {config.capture.capacity_gib:g} is more than the {free:.1f} "
            f"GiB free in {folder}; e.g. {max(free / 2, 0.01):.2f}"
        )
    if (num_layers := model.get("num_hidden_layers", MIN_CAPTURED_LAYERS)) < MIN_CAPTURED_LAYERS:
        raise ConfigError(
            "capture.enabled: drafters read three hidden states, but policy.model has "
            f"{num_layers} layers; set it to false, or use a deeper model"
        )


def _check_prompts(
    config: TrainConfig,
    engine: EngineConfig,
    model: dict[str, Any],
    draft_tokens: int,
    prompts: Sequence[tuple[tuple[int, ...], str]],
) -> tuple[int, int]:
    """Return the tokens of the longest prompt, and of the longest that leaves room for a response.

    An engine keeps room for a draft at the end of a sample.
    """
    longest, problem_id = max((len(tokens), problem_id) for tokens, problem_id in prompts)
    highest, vocabulary = max(max(tokens) for tokens, _ in prompts), model.get("vocab_size")
    if vocabulary is not None and highest >= vocabulary:
        raise ConfigError(
            f"policy.model = {config.policy.model!r}: its tokenizer makes token {highest}, but "
            f"the model knows {vocabulary}; save the model's own tokenizer there"
        )
    response, margin = config.sampling.max_tokens, draft_tokens + 1 if draft_tokens else 0
    given, limit = engine.engine_args.get("max_model_len"), model.get("max_position_embeddings")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if given and limit and given > limit and not scaled:
        raise ConfigError(
            f"engine.engine_args.max_model_len = {given!r} is more than the {limit} tokens that "
            f"policy.model takes; set it to {limit} or less"
        )
    room = (given or limit or sys.maxsize) - response - margin
    if longest <= room:
        return longest, room
    needed = longest + response + margin
    what = (
        f"prompt of {problem_id} ({longest} tokens) + sampling.max_tokens ({response}) + {margin} "
        f"for drafts is {needed}"
    )
    if given is not None:
        raise ConfigError(
            f"engine.engine_args.max_model_len = {given!r} does not hold a sample: {what}; set it "
            f"to {needed} or more, or lower sampling.max_tokens"
        )
    raise ConfigError(
        f"policy.model takes {limit} tokens: {what}; lower sampling.max_tokens to "
        f"{max(1, response - (longest - room))}, or use a model with a longer context"
    )


def _check_experts(model: dict[str, Any]) -> None:
    """Refuse mixtures of experts other than Qwen3-MoE with experts in every layer."""
    whole = {**(model.get("text_config") or {}), **model}
    found = next((key for key in EXPERT_KEYS if whole.get(key)), None)
    kind, is_whole = whole.get("model_type"), whole.get("decoder_sparse_step", 1) == 1
    if found is None or (kind == "qwen3_moe" and is_whole and not whole.get("mlp_only_layers")):
        return
    raise ConfigError(
        f"policy.model: {kind} with {found} = {whole[found]!r} is a mixture of experts that TLT "
        "does not train; use Qwen3-MoE with experts in every layer, such as Qwen/Qwen3-30B-A3B, or "
        "a dense model"
    )


def _plan_memory(
    config: TrainConfig, model: dict[str, Any], prompt_tokens: int, draft_tokens: int
) -> list[Place]:
    """Return the memory plan, or refuse a run that does not fit."""
    if not model.keys() >= SHAPE_KEYS:
        return []  # not of the Llama or Qwen type: nothing to calculate from
    found, given = this_machine(), config.node
    # The nodes of a cluster, or GPUs elsewhere: this machine says nothing about them.
    elsewhere = os.environ.get("RAY_ADDRESS") or _has_gpus_elsewhere(config.engine)
    host_bytes = None if elsewhere else found.host_bytes
    machine = Machine(
        num_gpus=given.num_gpus or found.num_gpus,
        gpu_bytes=int(given.gpu_gib * GIB) if given.gpu_gib else found.gpu_bytes,
        host_bytes=int(given.host_gib * GIB) if given.host_gib else host_bytes,
    )
    return check_memory(Sizes(config, model, machine, prompt_tokens, draft_tokens))


def _has_gpus_elsewhere(engine: EngineSettings) -> bool:
    """Say whether a run is checked on a machine that has not the GPUs it wants."""
    return engine.num_gpus > 0 and this_machine().num_gpus is None


async def _check_reward(
    config: TrainConfig, held_out: Sequence[HeldOut], function: RewardFunction, problem: Problem
) -> None:
    """Score one response of each kind as the run will, in a process and under the time limit."""
    firsts = [(f"reward.function = {config.reward.function!r}", function, problem)]
    firsts += [(each.setting, each.reward, each.problems[0]) for each in held_out if each.name]
    pool = RewardPool(function, 1, config.reward.timeout_s, [each.reward for each in held_out])
    try:
        for setting, scores, first in firsts:
            reward = await pool.score(first, first.answer, scores)
            if reward.fault is not None:
                raise ConfigError(
                    f"{setting} fails on the first problem ({reward.fault}): {reward.detail}; it "
                    "must return a finite number, e.g. 1.0, within reward.timeout_s = "
                    f"{config.reward.timeout_s:g}"
                )
    finally:
        pool.close()
