"""Attention over packed rows for Hugging Face models, through their attention registry.

A packed row holds several samples one after another. Attention within each sample needs no mask
and costs the sum of the squared lengths instead of the square of the sum. On heavy-tailed lengths
that difference is most of a training step on a CPU. The model's forward takes the sample lengths as
a keyword argument: `policy.model(ids, position_ids=..., segment_lengths=[...])`.

Samples of one prompt may share the prompt's tokens. Everything but attention is then computed once
for the prompt. Attention sees every sample whole, through two indices: `unshare` lays the row out
sample by sample, and `share` takes each token's result from the first sample that has the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tlt.errors import ConfigError

NAME = "tlt_packed"


def use_packed_attention(policy: Any) -> None:
    """Make `policy` attend within samples only; its forward then requires `segment_lengths`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    policy.set_attn_implementation(NAME)


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
    for name in ("sliding_window", "softcap"):
        if options.get(name) is not None:
            raise ConfigError(
                f"policy.model: its attention has a {name}, which packed rows do not support; "
                "use a model with full attention"
            )
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
