"""Loss and metrics of an unrolled drafter against the target's own distribution.

Pass j of the chain at s predicts token s+2+j, whose true distribution the target gave at
position s+1+j. Targets are soft, restricted to the draft vocabulary. Later passes weigh less
because a draft is only as long as its first mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class UnrolledLoss:
    loss: torch.Tensor
    agreement: list[float]
    """Per pass, the share of chains whose most likely draft token is the target's."""


def unrolled_loss(
    draft_logits: list[torch.Tensor],
    target_logits_BTV: torch.Tensor,
    target_argmax_BT: torch.Tensor,
    draft_token_ids_V: torch.Tensor,
    mask_BT: torch.Tensor,
) -> UnrolledLoss:
    """`target_logits_BTV[:, t]` is the target's logits at position t over the draft vocabulary.

    `mask_BT[:, t]` says whether the target's prediction at t is to be learned.
    """
    total = draft_logits[0].new_zeros(())
    weight_sum = 0.0
    agreement = []
    for step, logits_BTV in enumerate(draft_logits):
        shift = step + 1
        logits = logits_BTV[:, : logits_BTV.shape[1] - shift]
        mask = mask_BT[:, shift:]
        count = mask.sum().clamp(min=1)
        soft = target_logits_BTV[:, shift:].float().softmax(-1)
        cross_entropy = -(soft * F.log_softmax(logits.float(), -1)).sum(-1)
        weight = STEP_DECAY**step
        total = total + weight * (cross_entropy * mask).sum() / count
        weight_sum += weight
        with torch.no_grad():
            guess = draft_token_ids_V[logits.argmax(-1)]
            hits = ((guess == target_argmax_BT[:, shift:]) & mask).sum()
            agreement.append((hits / count).item())
    return UnrolledLoss(total / weight_sum, agreement)
