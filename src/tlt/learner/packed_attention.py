"""Attention over packed rows for Hugging Face models, through their attention registry.

A packed row holds several samples one after another. Attention within each sample needs no mask
and costs the sum of the squared lengths instead of the square of the sum. On heavy-tailed lengths
that difference is most of a training step on a CPU. The model's forward takes the sample lengths as
a keyword argument: `policy.model(ids, position_ids=..., segment_lengths=[...])`.

Samples of one prompt may share the prompt's tokens. Everything but attention is then computed once
for the prompt. Attention sees every sample whole, through two indices: `unshare` lays the row out
sample by sample, and `share` takes each token's result from the first sample that has the token.

Two implementations compute the same: a loop over the samples with torch's attention, which runs on
every device and dtype, and torch's `varlen_attn`, one kernel for the whole row, for bfloat16 on
GPUs. Shapes: T tokens of a row, N heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from tlt.errors import ConfigError

LOOP, KERNEL = "tlt_packed", "tlt_packed_varlen"
"""Names of the two implementations in the attention registry."""
CAUSAL = (-1, 0)
"""`varlen_attn` window that reaches all earlier tokens and no later one."""


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `varlen_attn` can compute rows of this dtype on this device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def use_packed_attention(policy: Any, kernel: bool = False) -> None:
    """Make `policy` attend within samples only; its forward then requires `segment_lengths`.

    `kernel` computes with `varlen_attn`, and requires `segment_ends`, too.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, attention in ((LOOP, _attention), (KERNEL, _kernel_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    policy.set_attn_implementation(KERNEL if kernel else LOOP)


def segment_ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return 0 and the end of each sample, as `varlen_attn` takes them."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in ("sliding_window", "softcap"):
        if options.get(name) is not None:
            raise ConfigError(
                f"policy.model: its attention has a {name}, which packed rows do not support; "
                "use a model with full attention"
            )


def _attention(
    module: Any,
    query_1NTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    segment_lengths: Sequence[int],
    unshare: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _check_options(options)
    if unshare is not None:
        query_1NTD, key_1KTD, value_1KTD = (
            states.index_select(2, unshare) for states in (query_1NTD, key_1KTD, value_1KTD)
        )
    groups = query_1NTD.shape[1] // key_1KTD.shape[1]
    lengths = list(segment_lengths)
    attended = [
        F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1),
            is_causal=True, scale=scaling,
        )
        for q, k, v in zip(
            query_1NTD.split(lengths, 2),
            key_1KTD.split(lengths, 2),
            value_1KTD.split(lengths, 2),
            strict=True,
        )
    ]  # fmt: skip
    attended_1NTD = torch.cat(attended, 2)
    if share is not None:
        attended_1NTD = attended_1NTD.index_select(2, share)
    return attended_1NTD.transpose(1, 2).contiguous(), None


def _kernel_attention(
    module: Any,
    query_1NTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    segment_lengths: Sequence[int],
    segment_ends: torch.Tensor,
    unshare: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _check_options(options)
    query_TND, key_TKD, value_TKD = (
        states[0].transpose(0, 1) for states in (query_1NTD, key_1KTD, value_1KTD)
    )
    if unshare is not None:
        query_TND, key_TKD, value_TKD = (
            states.index_select(0, unshare) for states in (query_TND, key_TKD, value_TKD)
        )
    longest = max(segment_lengths)
    attended_TND = varlen_attn(
        query_TND, key_TKD, value_TKD, segment_ends, segment_ends, longest, longest,
        scale=scaling, window_size=CAUSAL, enable_gqa=True,
    )  # fmt: skip
    assert isinstance(attended_TND, torch.Tensor)
    if share is not None:
        attended_TND = attended_TND.index_select(0, share)
    return attended_TND[None], None
