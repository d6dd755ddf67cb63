"""vLLM's engine arguments for an `EngineConfig`, as plain dicts. Does not import vLLM."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tlt.config.rollout import EngineConfig, NgramConfig
from tlt.contracts import DRAFTERS, Arm, DrafterName
from tlt.errors import ConfigError
from tlt.strategy.graphs import GraphPlan, choices_of
from tlt.strategy.spec import StrategySpec, build_strategy, complete_strategy
from tlt.vllm.environment import TRANSFER_BACKENDS, uses_v2
from tlt.vllm.lossless_checks import check_code, check_engine, has_drafter, speculates

CONFIG_KEY = "tlt"
"""Key of our settings in vLLM's `additional_config`."""
BEGUN = "tlt_begun"
"""Key in a request's `extra_args`: how many tokens of its response are at the end of its prompt."""
RECORDED_CACHES = 2
"""Size of the recorder of hidden states in KV caches: preempted requests and prompts of ended
requests have states, too."""
WAITING_STEPS = 2
"""Largest engine steps whose hidden states may wait on the host for the recorder."""
_HERE = "tlt.vllm"
CPU_BLOCK_SIZE = 32
"""Tokens of a block of the KV cache on CPUs, the fewest of vLLM's fast attention there. Requests
share whole blocks of their prompts, and with vLLM's own 128 most groups would share nothing."""
GRAPH_ARGS = {
    "compilation_config",
    "cudagraph_capture_sizes",
    "enforce_eager",
    "max_cudagraph_capture_size",
    "optimization_level",
}
"""Arguments of vLLM by which a user chooses graphs or compilation."""

TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "dict[str, Any]": (dict,),
    "None": (type(None),),
}
"""Types that are checked; an argument of any other type is left to vLLM."""
LIMITS = {
    "data_parallel_size": (1, 10_000),
    "gpu_memory_utilization": (0.01, 1),
    "max_model_len": (1, 1_000_000_000),
    "max_num_batched_tokens": (1, 100_000_000),
    "max_num_seqs": (1, 100_000),
    "tensor_parallel_size": (1, 10_000),
}
"""Smallest and largest value of arguments that plans are made from."""


def num_begun(sampling_params: Any) -> int:
    """Return how many tokens of a request's response are at the end of its prompt."""
    return int((sampling_params.extra_args or {}).get(BEGUN, 0)) if sampling_params else 0


def drafters(config: EngineConfig) -> list[DrafterName]:
    """Return the drafters of a strategy whose spec names no arms.

    N-grams draft beside the draft model, which may be new and untrained. On the V1 runner they
    would cost every engine step its asynchronous scheduling, so there the draft model is alone on
    GPUs. On V2 an n-gram arm costs only the engine steps that use it (`tlt.vllm.ngram.v2`).
    """
    names = [name for name in DRAFTERS if has_drafter(config, name)]
    with_model = [name for name in names if not DRAFTERS[name].module]
    alone = with_model and config.num_gpus and not uses_v2(config)
    return with_model if alone else names


def strategy_spec(config: EngineConfig, spec: StrategySpec | None = None) -> dict[str, Any]:
    """Return the engine's strategy, or another one for this engine, with its arms named."""
    on_gpu = config.num_gpus > 0 or config.emulate is not None
    return complete_strategy(config.strategy if spec is None else spec, drafters(config), on_gpu)


def max_draft_tokens(config: EngineConfig) -> int:
    """Return the longest draft that this engine can verify; 0 for an engine that never drafts."""
    arms = build_strategy(strategy_spec(config)).arms()
    if not speculates(config, arms):
        return 0
    longest = max((arm.num_draft_tokens for arm in arms), default=0)
    speculative = config.engine_args.get("speculative_config") or {}
    given = speculative.get("num_speculative_tokens", 0)
    return max(longest, config.max_draft_tokens or 0, given) or 1


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `EngineArgs`, or refuse the settings."""
    check_args(config.engine_args)
    strategy = strategy_spec(config)
    arms = build_strategy(strategy).arms()
    check_engine(config, arms)
    check_code(config)
    on_gpu = config.num_gpus > 0
    on_v2 = uses_v2(config)
    # A lookup of the V1 runner needs the tokens of the last engine step.
    can_be_async = on_v2 or not any(arm.looks_up for arm in arms)
    is_async = bool(config.engine_args.get("async_scheduling", on_gpu and can_be_async))
    args: dict[str, Any] = {
        "model": config.model,
        "async_scheduling": is_async,
        "scheduler_cls": f"{_HERE}.scheduler.Adaptive{'Async' if is_async else ''}Scheduler",
        "worker_cls": f"{_HERE}.worker.AdaptiveGPUWorker"
        if on_gpu
        else f"{_HERE}.cpu_worker.AdaptiveCPUWorker",
        "weight_transfer_config": {"backend": TRANSFER_BACKENDS[config.weights]},
        "additional_config": {
            CONFIG_KEY: {
                "strategy": strategy,
                "runner": "v2" if on_v2 else "v1",
                **_lookups(config, can_look_up=on_v2 or not is_async),
                "drafter_state_bytes": config.drafter_state_mib * 2**20,
                "records": config.capture is not None,
                **({"emulate": config.emulate} if config.emulate else {}),
            }
        },
        "disable_log_stats": True,
        "enable_prefix_caching": True,
    }
    num_workers = _num_workers(config)
    args["tensor_parallel_size"] = num_workers
    if num_workers > 1:
        # In a placement group vLLM would take its Ray executor, which wants one GPU per bundle.
        args["distributed_executor_backend"] = "mp"
    if on_gpu:
        # Sleep of level 2 drops all weights; the policy is sent again, the drafter is not.
        args["sleep_preserve_parameter_names"] = ["draft.*"]
    else:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        args["block_size"] = CPU_BLOCK_SIZE
    user = dict(config.engine_args)
    plan = graph_plan(config)
    if plan is not None:
        args["compilation_config"] = plan.compilation_config()
    speculative = _speculative_config(config, user.pop("speculative_config", None) or {}, plan)
    if speculative is not None:
        args["speculative_config"] = speculative
    return args | user


def _lookups(config: EngineConfig, can_look_up: bool) -> dict[str, Any]:
    """Return the settings of every drafter without a model; None for one that is left out."""
    return {
        name: None
        if not can_look_up or not has_drafter(config, name)
        else getattr(config, drafter.setting).model_dump()
        if drafter.setting
        else {}
        for name, drafter in DRAFTERS.items()
        if drafter.module
    }


def _num_workers(config: EngineConfig) -> int:
    """Return the engine's tensor-parallel size: its GPUs, or what `engine_args` says on CPUs."""
    if config.num_gpus:
        return config.num_gpus
    wanted = int(config.engine_args.get("tensor_parallel_size", 1))
    if config.num_cores % wanted:
        raise ConfigError(
            f"engine_args.tensor_parallel_size = {wanted} with engine.num_cores = "
            f"{config.num_cores}: each worker has as many cores; set engine.num_cores = {wanted}"
        )
    return wanted


def graph_plan(config: EngineConfig) -> GraphPlan | None:
    """Return the CUDA graphs for every arm of a GPU engine; None leaves the choice to vLLM.

    vLLM chooses where `engine_args` sets graphs or compilation, or does not set `max_num_seqs`.
    """
    user = config.engine_args
    max_num_seqs = user.get("max_num_seqs")
    if config.num_gpus == 0 or not isinstance(max_num_seqs, int) or GRAPH_ARGS & user.keys():
        return None
    strategy = build_strategy(strategy_spec(config))
    choices = choices_of(strategy, max_num_seqs)
    longest = max_draft_tokens(config)
    if longest > max(arm.num_draft_tokens for arm in strategy.arms()):
        # A later strategy may use drafts of up to this length.
        choices = [(limit, arms | {Arm("eagle3", longest)}) for limit, arms in choices]
    return GraphPlan.for_arms(
        choices, max_num_seqs, max_num_batched_tokens=user.get("max_num_batched_tokens")
    )


def _speculative_config(
    config: EngineConfig, user: dict[str, Any], plan: GraphPlan | None
) -> dict[str, Any] | None:
    longest = max_draft_tokens(config)
    if longest == 0:
        return None
    speculative: dict[str, Any] = {
        "num_speculative_tokens": longest,
        # This key tells vLLM that the draft length changes at run time; our scheduler sets it.
        "num_speculative_tokens_per_batch_size": (
            plan.draft_schedule() if plan else [[1, 1_000_000, longest]]
        ),
    }
    if config.drafter is not None:
        speculative |= {"method": "eagle3", "model": config.drafter}
    else:  # vLLM's one place for drafts without a model
        ngram = config.ngram or NgramConfig()
        speculative |= {
            "method": "ngram_gpu" if uses_v2(config) else "ngram",
            "prompt_lookup_min": ngram.min_match,
            "prompt_lookup_max": ngram.max_match,
        }
    return speculative | user


# --- the names and types of vLLM's arguments ----------------------------------------------------
#
# vLLM takes any type for most arguments and fails minutes later, in the engine's process. They are
# read from the source of the installed version, so nothing here has to follow vLLM's releases.


def check_args(given: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, and values of a wrong type."""
    known = arguments()
    for name, value in given.items():
        if known is not None and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"engine_args.{name} is not a vLLM argument; {hint}")
        kind = known[name] if known is not None else ""
        if value is not None and not _is_of(value, kind):
            raise ConfigError(
                f"engine_args.{name} = {repr(value)[:60]} should be {kind}; remove it to have "
                "vLLM's default"
            )
        low, high = LIMITS.get(name, (None, None))
        if low is None or high is None or value is None:
            continue
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"engine_args.{name} = {repr(value)[:60]} should be a number from {low:g} to "
                f"{high:g}; remove it for vLLM's default"
            )


@cache
def arguments() -> dict[str, str] | None:
    """Return the type of every argument as vLLM writes it; None without vLLM's source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()
    except OSError:
        return None
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return {
                field.target.id: ast.unparse(field.annotation)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
    return None


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a type, as far as the type is one of `TYPES`."""
    parts = [part.strip() for part in kind.split(" | ")]
    if any(part not in TYPES for part in parts):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    allowed = {each for part in parts for each in TYPES[part]}
    return type(value) in allowed
