"""From an `EngineConfig` to vLLM's engine arguments. Plain dicts in and out, no vLLM import."""

from __future__ import annotations

from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.rollout.guard import check_engine, speculates
from tlt.rollout.vllm.plugin import TRANSFER_BACKEND
from tlt.speculation.policies import build_policy

_HERE = "tlt.rollout.vllm"


def max_draft_tokens(config: EngineConfig) -> int:
    """The longest draft this engine must be able to verify; 0 for an engine that never drafts."""
    arms = build_policy(config.policy).arms()
    if not speculates(config, arms):
        return 0
    longest = max((arm.num_draft_tokens for arm in arms), default=0)
    given = config.engine_args.get("speculative_config", {}).get("num_speculative_tokens", 0)
    return max(longest, config.max_draft_tokens or 0, given) or 1


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`; raises before anything starts."""
    arms = build_policy(config.policy).arms()
    check_engine(config, arms)
    on_gpu = config.num_gpus > 0
    needs_cpu_tokens = any(arm.drafter == "ngram" for arm in arms)
    is_async = bool(config.engine_args.get("async_scheduling", on_gpu and not needs_cpu_tokens))
    args: dict[str, Any] = {
        "model": config.model,
        "async_scheduling": is_async,
        "scheduler_cls": f"{_HERE}.scheduler.Adaptive{'Async' if is_async else ''}Scheduler",
        "worker_cls": f"{_HERE}.worker.Adaptive{'GPU' if on_gpu else 'CPU'}Worker",
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "additional_config": {
            "tlt": {
                "policy": dict(config.policy),
                "ngram": config.ngram.model_dump() if config.ngram and not is_async else None,
            }
        },
        "disable_log_stats": True,
        "enable_prefix_caching": True,
    }
    if on_gpu:
        args["tensor_parallel_size"] = config.num_gpus
    else:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    user = dict(config.engine_args)
    speculative = _speculative_config(config, user.pop("speculative_config", None) or {})
    if speculative is not None:
        args["speculative_config"] = speculative
    return args | user


def _speculative_config(config: EngineConfig, user: dict[str, Any]) -> dict[str, Any] | None:
    longest = max_draft_tokens(config)
    if longest == 0:
        return None
    speculative: dict[str, Any] = {
        "num_speculative_tokens": longest,
        # Tells vLLM that the draft length changes at run time; our scheduler sets its value.
        "num_speculative_tokens_per_batch_size": [[1, 1_000_000, longest]],
    }
    if config.drafter is not None:
        speculative |= {"method": "eagle3", "model": config.drafter}
    elif config.ngram is not None:
        speculative |= {
            "method": "ngram",
            "prompt_lookup_min": config.ngram.min_match,
            "prompt_lookup_max": config.ngram.max_match,
        }
    return speculative | user
