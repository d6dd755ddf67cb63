"""Drafts from n-grams: the texts of recent samples, and lookups in them on V1 and V2.

The imports are late: vLLM's start-up on CPU walks all loaded modules, and fails on numba's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tlt.vllm.runner import Lookup


def on_v1(vllm_config: Any, runner: Any, ngram: dict[str, int]) -> Lookup:
    """Return the lookup that these settings ask for, on vLLM's V1 runner."""
    from tlt.vllm.ngram.v1 import HistoryV1, OwnTextV1

    ngram = _settings(vllm_config, ngram)
    if ngram["history_tokens"]:
        return HistoryV1(runner, vllm_config.model_config.max_model_len, ngram)
    return OwnTextV1(view(vllm_config, ngram))


def on_v2(vllm_config: Any, device: Any, req_states: Any, ngram: dict[str, int]) -> Lookup:
    """Return the lookup that these settings ask for, on vLLM's V2 runner."""
    from tlt.vllm.ngram.v2 import HistoryV2, OwnTextV2

    ngram = _settings(vllm_config, ngram)
    if ngram["history_tokens"]:
        return HistoryV2(device, req_states, ngram)
    return OwnTextV2(view(vllm_config, ngram), device, req_states)


def _settings(vllm_config: Any, ngram: dict[str, int]) -> dict[str, int]:
    """Return the settings with match lengths that a user gave vLLM, if there are any."""
    speculative = vllm_config.speculative_config
    given = {
        "min_match": getattr(speculative, "prompt_lookup_min", None),
        "max_match": getattr(speculative, "prompt_lookup_max", None),
    }
    return ngram | {name: value for name, value in given.items() if value}


def view(vllm_config: Any, ngram: dict[str, int]) -> Any:
    """Return a config for vLLM's own lookup: vLLM's has match lengths for the method "ngram" only.

    It has just the fields that vLLM's lookup reads.
    """
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=ngram["min_match"],
            prompt_lookup_max=ngram["max_match"],
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        ),
        model_config=vllm_config.model_config,
        scheduler_config=vllm_config.scheduler_config,
        parallel_config=getattr(vllm_config, "parallel_config", None),
    )
