"""The clipped policy-gradient loss over the response tokens of a packed row.

Sums over tokens, never means: the learner divides once by what the whole batch counts, so that the
gradient does not depend on how samples are split into rows and ranks.

Shapes: T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    clip_low: float
    """How far a token's probability may fall below that of the policy that sampled it."""
    clip_high: float
    """How far it may rise: more than it may fall, so that rare tokens can become likely."""
    kl_weight: float
    """Weight of the divergence from a reference policy; 0 needs no reference."""
    max_importance: float
    """Cap of the weights that make up for engine and learner disagreeing about probabilities; 0
    leaves these weights out."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    total: torch.Tensor
    """Sum over tokens, with its gradient."""
    clipped_tokens: float
    kl_sum: float
    """Divergence from the reference, summed over tokens."""
    gap_sum: float
    """|log-probability in the engine - in the learner before the update|, summed over tokens."""
    capped_tokens: float
    """Tokens whose importance weight hit the cap."""


def policy_loss(
    logprob_T: torch.Tensor,
    old_logprob_T: torch.Tensor,
    engine_logprob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    weight_T: torch.Tensor,
    settings: PolicyLossSettings,
    reference_logprob_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """`old_logprob_T` is the learner's own before any update of this batch.

    `weight_T` says how much each token counts: 1 for a mean over tokens, or one over its sample's
    length for a mean over samples.
    """
    ratio_T = (logprob_T - old_logprob_T).exp()
    bounded_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain_T = torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    with torch.no_grad():
        gap_T = old_logprob_T - engine_logprob_T
        importance_T = torch.ones_like(gap_T)
        capped_tokens = 0.0
        if settings.max_importance > 0:
            importance_T = gap_T.exp().clamp(max=settings.max_importance)
            capped_tokens = (gap_T.exp() > settings.max_importance).sum().item()
        clipped_T = ratio_T * advantage_T > bounded_T * advantage_T
    per_token_T = -importance_T * gain_T
    kl_sum = 0.0
    if reference_logprob_T is not None and settings.kl_weight > 0:
        difference_T = reference_logprob_T - logprob_T
        kl_T = difference_T.exp() - difference_T - 1  # unbiased, never negative
        per_token_T = per_token_T + settings.kl_weight * kl_T
        kl_sum = kl_T.detach().sum().item()
    return PolicyLoss(
        total=(weight_T * per_token_T).sum(),
        clipped_tokens=clipped_T.sum().item(),
        kl_sum=kl_sum,
        gap_sum=gap_T.abs().sum().item(),
        capped_tokens=capped_tokens,
    )
