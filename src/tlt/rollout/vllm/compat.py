"""Faults of vLLM 0.32 that we work around, and every touch of its private parts for that.

`apply()` runs in every engine process, through the plug-in's entry point. Each fix says what
it needs, why the public way is not enough, and when it can go. `TLT_COMPAT_SKIP=name,name`
leaves fixes out: the tests use it to show that each one is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""First supported version, first version that is not."""

SKIP_VARIABLE = "TLT_COMPAT_SKIP"

_applied: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Fix:
    name: str
    why: str
    apply: Callable[[], None]
    cpu_only: bool = True


def _fix_expand() -> None:
    """Sampling settings per draft token are uninitialised memory on CPU.

    The CPU stand-in for the expand kernel converts a float output to int64 and never writes the
    result back, so temperature, top-k and top-p of each draft token are whatever was in memory
    (vllm-project/vllm#55005). `RejectionSampler` looks the function up in its own module, so
    replacing it there is enough. Can go when the kernel writes floats.
    """
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        if replace_from != replace_to:
            x = torch.where(x == replace_from, replace_to, x)
        return x.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _fix_amx() -> None:
    """The CPU attention kernel dies of SIGILL on very short prompts where AMX was never asked for.

    The kernel uses AMX tiles without first asking the operating system for them; torch does so
    only when it meets a large enough matrix product. Asking early is harmless where there is no
    AMX. Can go when vLLM asks itself.
    """
    torch.cpu._init_amx()


def _fix_sharing() -> None:
    """A drafter whose head or embedding equals the policy's is given the policy's own module.

    vLLM compares them when it loads the drafter and, to save memory, lets both use one module. New
    drafter weights are then loaded into the policy. On V1 our proposer takes the drafter's modules
    back (`proposer`); on V2 the drafter keeps every module that it has. Can go when vLLM loads
    drafter weights into modules of the drafter only.
    """
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    decide = utils._should_share

    def should_share(eagle: Any, flag: str, draft: Any, target: Any) -> bool:
        return draft is None and bool(decide(eagle, flag, draft, target))

    utils._should_share = should_share


FIXES = (
    Fix("expand", "sampling settings per draft token are garbage", _fix_expand),
    Fix("amx", "SIGILL in attention on very short prompts", _fix_amx),
    Fix("sharing", "a drafter swap would write into the policy", _fix_sharing, cpu_only=False),
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
    """Whether a fix or a check is left out, to show that it is needed."""
    return name in _skipped()


def applied() -> dict[str, bool]:
    """Which fixes are active in this process."""
    return dict(_applied)


# --- loading weights into a running model -------------------------------------------------------
# `model.load_weights` in place does not work on CPU: linear weights are packed for the kernels and
# the originals dropped (AttributeError: weight_loader). vLLM's layerwise reload restores the
# loadable form, takes the weights, and packs again; it has no public name for use outside a
# weight-transfer engine. Even so a head tied to the embedding keeps its old packed copy, because no
# weight of its own is ever loaded: it is packed again here. Can go when vLLM does that.


def begin_reload(model: torch.nn.Module) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with disable_mtp_completeness_check():
        model.load_weights(weights)


def end_reload(model: torch.nn.Module, model_config: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)


def repack_tied_heads(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or skips("tied_head"):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# --- what a drafter has of its policy -----------------------------------------------------------
# A drafter whose checkpoint has no embedding (or no head) uses the policy's. vLLM lets it share the
# policy's module; here it has a copy, renewed after every update of the policy. That costs the
# memory of one embedding, and nothing that is done to the drafter can reach the policy.


def copy_policy_into_drafter(policy: torch.nn.Module, drafter: torch.nn.Module) -> None:
    """Renew what the drafter's own checkpoint does not bring."""
    if skips("sharing"):
        return
    borrowed = _borrowed(policy, drafter)
    for _, theirs, own in borrowed:
        own.weight.data.copy_(theirs.weight.data)
    if borrowed:
        repack_tied_heads(drafter)


def drafter_faults(policy: torch.nn.Module, drafter: torch.nn.Module) -> list[str]:
    """Say which tensors a drafter shares with the policy, and which of its copies are old."""
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
    """Name, module of the policy and module of the drafter, of what the drafter does not bring."""
    language = policy.get_language_model() if hasattr(policy, "get_language_model") else policy
    pairs = [
        ("embed_tokens", "has_own_embed_tokens", language.model, drafter.model),
        ("lm_head", "has_own_lm_head", language, drafter),
    ]
    found = []
    for name, flag, theirs, own in pairs:
        source, target = getattr(theirs, name, None), getattr(own, name, None)
        if source is None and name == "embed_tokens":
            source = getattr(theirs, "embedding", None)  # as some models call it
        if source is None or target is None or getattr(drafter, flag, True):
            continue
        if source.weight.shape == target.weight.shape:
            found.append((name, source, target))
    return found


# --- is this the vLLM we know? ------------------------------------------------------------------


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def version_supported(version: str) -> bool:
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return SUPPORTED_VLLM[0] <= numbers < SUPPORTED_VLLM[1]
