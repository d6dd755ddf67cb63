"""Loss of an unrolled drafter against the policy's own distribution.

Pass j of the chain at s predicts token s+2+j, whose true distribution the policy gave at position
s+1+j. Targets are soft, restricted to the draft vocabulary. Later passes weigh less because a draft
is only as long as its first mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

STEP_DECAY = 0.8
"""Weight of each pass relative to the pass before it."""


def unrolled_loss(
    draft_logits: Sequence[torch.Tensor], target_probs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the cross-entropy of draft logits against the policy's distributions.

    Both sequences hold one tensor [n_j, V] per pass j.
    """
    total = draft_logits[0].new_zeros((), dtype=torch.float32)
    weight_sum = 0.0
    for step, (drafted, target) in enumerate(zip(draft_logits, target_probs, strict=True)):
        if not len(drafted):
            continue
        weight = STEP_DECAY**step
        total = total + weight * F.cross_entropy(drafted.float(), target)
        weight_sum += weight
    return total / max(weight_sum, 1.0)
