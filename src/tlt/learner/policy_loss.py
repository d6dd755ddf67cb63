"""The clipped policy-gradient loss over the response tokens of a packed row.

The loss is a sum over tokens, never a mean. The learner divides once by the denominator of the
whole batch, so that the gradient does not depend on how samples are split into rows and ranks.

Shapes: T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlt.config.train import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    total: torch.Tensor
    """Loss summed over tokens, with its gradient."""
    clipped_tokens: float
    kl_sum: float
    """KL divergence from the reference policy, summed over tokens."""
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
    settings: AlgorithmConfig,
    reference_logprob_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """Return the loss of one row's response tokens.

    `old_logprob_T` is from the learner, before any update on this batch. `weight_T` is the weight
    of each token: 1 for a mean over tokens, 1 / length of its sample for a mean over samples.
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
