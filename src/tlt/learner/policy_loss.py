"""The policy-gradient loss over the response tokens of a packed row.

The loss is a sum over tokens, never a mean. The learner divides once by the denominator of the
whole batch, so the gradient does not depend on how samples are split into rows and ranks.

Shapes: T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tlt.config.train import AlgorithmConfig
from tlt.user_code import chosen_function

TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AlgorithmConfig], torch.Tensor]
"""`loss(logprob_T, old_logprob_T, advantage_T, settings)` returns the loss of each token, before
importance weights and the KL term. `old_logprob_T` is from before the update, without a gradient.
"""


def clipped(
    logprob_T: torch.Tensor,
    old_logprob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    settings: AlgorithmConfig,
) -> torch.Tensor:
    """Return the loss of PPO: a token whose ratio left the range has no gradient."""
    ratio_T = (logprob_T - old_logprob_T).exp()
    bounded_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)


LOSSES: dict[str, TokenLoss] = {"clipped": clipped}


def loss_function(name: str) -> TokenLoss:
    """Return the function that `algorithm.loss` names."""
    return chosen_function("algorithm.loss", name, LOSSES, "my_algorithm:loss")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    total: torch.Tensor
    """Loss summed over tokens, with its gradient."""
    clipped_tokens: float
    """Tokens whose ratio went beyond the clipping range in the direction of their advantage."""
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
    token_loss: TokenLoss = clipped,
) -> PolicyLoss:
    """Return the loss of one row's response tokens.

    `old_logprob_T` is from the learner, before any update on this batch. `weight_T` is the weight
    of each token: 1 for a mean over tokens, 1 / length of its sample for a mean over samples.
    """
    with torch.no_grad():
        gap_T = old_logprob_T - engine_logprob_T
        importance_T = torch.ones_like(gap_T)
        capped_tokens = 0.0
        if settings.max_importance > 0:
            importance_T = gap_T.exp().clamp(max=settings.max_importance)
            capped_tokens = (gap_T.exp() > settings.max_importance).sum().item()
        ratio_T = (logprob_T - old_logprob_T).exp()
        bounded_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        clipped_T = ratio_T * advantage_T > bounded_T * advantage_T
    loss_T = token_loss(logprob_T, old_logprob_T, advantage_T, settings)
    per_token_T = importance_T * loss_T
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
