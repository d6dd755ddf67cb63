"""Checks that refuse lossy, unsupported and dangerous settings before any engine starts.

The checks are pure functions of plain settings. The rule is an allow-list: a setting that is not
known to keep the distribution of samples is refused, with the reason and a value that works. With
speculation off (no drafter, no n-gram arm), every vLLM setting is allowed, except those that run
code of others: they need permission.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import DRAFTERS, Arm, SampleRequest, SamplingSpec
from tlt.errors import ConfigError, LossyError
from tlt.vllm.environment import uses_v2

SPECULATIVE_KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_tensor_parallel_size",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "draft_sample_method",
        "rejection_sample_method",
        "enforce_eager",
        "max_model_len",
        "revision",
        "quantization",
        "attention_backend",
        "moe_backend",
    }
)
"""Keys of `speculative_config` that keep the distribution of samples."""

OWNED_ENGINE_ARGS = {
    "scheduler_cls": "TLT's scheduler chooses the drafts of each step",
    "worker_cls": "TLT's worker switches the drafter",
    "additional_config": "TLT passes its strategy there",
    "weight_transfer_config": "TLT's backend loads weights from shared memory",
    **dict.fromkeys(
        ("spec_method", "spec_model", "spec_tokens"),
        "TLT writes speculative_config, which holds the same; use engine.strategy and "
        "engine.drafter",
    ),
}

CODE_KEYS = frozenset(
    {
        *("trust_remote_code", "model_class_overrides", "logits_processors", "inductor_passes"),
        *("kv_transfer_config", "ec_transfer_config"),  # connectors, from any module
        *("log_config_file", "pylogging_config_file"),  # logging calls what such files name
    }
)
"""Arguments of vLLM, at any depth, that make it run code which it does not ship."""
CODE_SUFFIXES = ("_cls", "_class", "_plugin", "_module_path")
"""Ends of the names of such arguments."""
SHIPPED = {
    "distributed_executor_backend": {"mp", "ray", "uni", "external_launcher"},
    "compilation_config.backend": {"eager", "inductor"},
    "load_format": {
        *("auto", "hf", "safetensors", "pt", "npcache", "dummy", "mistral", "fastsafetensors"),
        *("sharded_state", "instanttensor", "runai_streamer", "runai_streamer_sharded"),
        "tensorizer",
    },
}
"""Arguments that name a part of vLLM, and its own parts; any other name loads code."""

MAX_TEMPERATURE = 2.0
MAX_DRAFT_TOKENS = 32

SAMPLING_EXTRAS = frozenset(
    {"min_tokens", "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens"}
)
"""Further sampling parameters that are known to work under speculation."""

PLAIN_PARAMS = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("logprobs", "prompt_logprobs", "flat_logprobs", "output_kind", "stream_interval"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("skip_clone", "skip_reading_prefix_cache", "output_text_buffer_length"),
        "extra_args",  # for custom logits processors, which the engine does not have
    }
)
"""vLLM's own sampling parameters that are known to work under speculation."""

_SAMPLING_REASONS = {
    "min_p": "vLLM does not apply it to drafted tokens",
    "logit_bias": "vLLM does not apply it to drafted tokens",
    "logits_processors": "custom processors do not see drafted tokens",
    "n": "every sample is its own request; submit it n times",
    "structured_outputs": "drafts past a grammar are not verified here",
}


def check_engine(config: EngineConfig, arms: Collection[Arm]) -> None:
    """Refuse settings of an engine that are lossy, unsupported or contradictory."""
    for name in sorted({arm.drafter for arm in arms} - {"off"}):
        if not has_drafter(config, name):
            drafter = DRAFTERS[name]
            raise ConfigError(
                f"strategy uses the drafter {name!r} but engine.{drafter.setting} is not set; e.g. "
                f"engine.{drafter.setting} = {drafter.example}"
            )
    if config.ngram is not None and config.ngram.min_match > config.ngram.max_match:
        raise ConfigError(
            f"engine.ngram.min_match = {config.ngram.min_match} is above max_match = "
            f"{config.ngram.max_match}; e.g. min_match = 2, max_match = 4"
        )
    longest = max((arm.num_draft_tokens for arm in arms), default=0)
    if config.max_draft_tokens is not None and longest > config.max_draft_tokens:
        raise ConfigError(
            f"engine.max_draft_tokens = {config.max_draft_tokens} but strategy drafts up to "
            f"{longest}; set it to {longest}"
        )
    if longest > MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"strategy drafts up to {longest} tokens, and an engine verifies at most "
            f"{MAX_DRAFT_TOKENS}; e.g. num_draft_tokens = 4"
        )
    args = config.engine_args
    for key, reason in OWNED_ENGINE_ARGS.items():
        if key in args:
            raise ConfigError(f"engine_args.{key} cannot be set: {reason}; remove it")
    if not speculates(config, arms):
        return
    _check_speculative_config(args.get("speculative_config") or {}, uses_v2(config))
    if args.get("logits_processors"):
        raise LossyError(
            "engine_args.logits_processors: custom processors do not see drafted tokens; remove "
            "it, or turn speculation off with strategy.kind = 'off' and no drafter"
        )
    if int(args.get("data_parallel_size", 1)) > 1:
        raise ConfigError(
            "engine_args.data_parallel_size > 1 turns vLLM's draft lengths off; use "
            "pool.num_engines for data parallelism and data_parallel_size = 1"
        )
    hides_tokens = bool(args.get("async_scheduling")) and not uses_v2(config)
    looks_up = any(arm.looks_up for arm in arms)
    if looks_up and config.drafter is not None and hides_tokens:
        raise ConfigError(
            "engine_args.async_scheduling = true hides the sampled tokens from the lookup "
            "of n-grams in vLLM's V1 runner; set it to false, or use the drafter 'eagle3' alone"
        )


def check_code(config: EngineConfig) -> None:
    """Refuse arguments that make vLLM run code which it does not ship, unless that is allowed."""
    if config.allow_code:
        return
    if found := code_arguments(config.engine_args):
        key, value = found[0]
        raise ConfigError(
            f"engine_args.{key} = {value!r} makes vLLM run Python code from outside vLLM and TLT "
            "with your privileges; remove it, or, if you trust that code, set "
            "engine.allow_code = true (`tlt drafter bench --allow-code`)"
        )


def code_arguments(args: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the arguments that make vLLM run code which it does not ship, by their dotted keys."""
    found: list[tuple[str, Any]] = []
    for name, value in args.items():
        key = f"{prefix}{name}"
        loads_code = (
            name in CODE_KEYS
            or name.endswith(CODE_SUFFIXES)
            or (key in SHIPPED and str(value) not in SHIPPED[key])
            or (key == "speculative_config.model" and _is_dotted(value))  # a class for vLLM
        )
        if value and loads_code:
            found.append((key, value))
        elif isinstance(value, Mapping):
            found += code_arguments(value, f"{key}.")
    return found


def _is_dotted(value: Any) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _check_speculative_config(speculative: Mapping[str, Any], on_v2: bool) -> None:
    for key in speculative:
        if key not in SPECULATIVE_KEYS:
            raise LossyError(
                f"engine_args.speculative_config.{key} is not known to keep the distribution of "
                f"samples; allowed are {', '.join(sorted(SPECULATIVE_KEYS))}"
            )
    drafts = speculative.get("num_speculative_tokens", 1)
    if not isinstance(drafts, int) or not 1 <= drafts <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"engine_args.speculative_config.num_speculative_tokens = {drafts!r} should be a "
            f"number from 1 to {MAX_DRAFT_TOKENS}; e.g. 4"
        )
    method = speculative.get("method", "eagle3")
    ngram = "ngram_gpu" if on_v2 else "ngram"
    if method not in ("eagle3", ngram):
        raise LossyError(
            f"engine_args.speculative_config.method = {method!r} is not supported; "
            f"'eagle3' or {ngram!r}"
        )
    rejection = speculative.get("rejection_sample_method", "standard")
    if rejection == "block" and not on_v2:
        raise ConfigError(
            "engine_args.speculative_config.rejection_sample_method = 'block' needs vLLM's V2 "
            "runner, which runs on GPUs; use 'standard', which accepts as many of TLT's drafts"
        )
    if rejection not in ("standard", "block"):
        raise LossyError(
            f"engine_args.speculative_config.rejection_sample_method = {rejection!r} changes "
            "which tokens are accepted; use 'standard' (same samples with and without drafts), or "
            "on GPUs 'block' (same distribution)"
        )


def check_sampling(sampling: SamplingSpec, speculating: bool) -> None:
    """Refuse wrong sampling settings, and settings that speculation would not honour."""
    if sampling.max_tokens < 1:
        raise ConfigError(f"sampling.max_tokens = {sampling.max_tokens}; at least 1")
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature = {sampling.temperature}; vLLM takes 0 to {MAX_TEMPERATURE:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"sampling.top_p = {sampling.top_p}; above 0, up to 1")
    if not speculating:
        return
    for key, value in sampling.extra.items():
        if key in SAMPLING_EXTRAS or not value:
            continue
        reason = _SAMPLING_REASONS.get(key, "it is not known to work under speculation")
        raise LossyError(
            f"sampling.extra.{key} = {value!r} is refused with speculation on: {reason}; remove "
            "it, or turn speculation off with strategy.kind = 'off' and no drafter"
        )


def check_params(changed: Mapping[str, Any]) -> None:
    """Refuse a request of another program, by its parameters of vLLM that differ from the default.

    vLLM makes a request of each sample if `n` > 1, so `n` is fine here.
    """
    for key, value in changed.items():
        if key in PLAIN_PARAMS or key.startswith("_"):
            continue
        reason = _SAMPLING_REASONS.get(key, "it is not known to work under speculation")
        raise LossyError(
            f"sampling parameter {key} = {repr(value)[:60]} is refused while TLT drafts: {reason}; "
            "leave it out (a server takes it from the model's generation_config.json unless "
            "started with --generation-config vllm), or start the program without TLT_CONFIG"
        )


def check_length(request: SampleRequest, max_model_len: int, max_draft_tokens: int) -> None:
    """Refuse a request that leaves no room for drafts below the length limit.

    One request near the limit would turn the drafter off for the whole batch, and leave holes in
    the drafter's KV cache.
    """
    margin = max_draft_tokens + 1 if max_draft_tokens else 0
    needed = len(request.prompt_token_ids) + request.sampling.max_tokens + margin
    if needed > max_model_len:
        raise ConfigError(
            f"sample {request.sample_id}: prompt {len(request.prompt_token_ids)} + max_tokens "
            f"{request.sampling.max_tokens} + {margin} for drafts is {needed}, above max_model_len "
            f"= {max_model_len}; set engine_args.max_model_len = {needed} or lower max_tokens"
        )


def has_drafter(config: EngineConfig, name: str) -> bool:
    """Return whether the settings of an engine include this drafter."""
    setting = DRAFTERS[name].setting
    return not setting or getattr(config, setting) is not None


def speculates(config: EngineConfig, arms: Collection[Arm]) -> bool:
    """Return whether this engine can ever draft."""
    return (
        config.drafter is not None
        or "speculative_config" in config.engine_args
        or any(arm.num_draft_tokens for arm in arms)
    )
