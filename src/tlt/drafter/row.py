"""Samples packed into one row, with the draft chains to learn or to evaluate.

Shapes: T positions, A fused states (3H), H hidden, C chains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.drafter.eagle3.model import Chains
from tlt.states.captured import Captured


class Row:
    """Samples packed into one row. A chain starts wherever the token after next is learned."""

    def __init__(self, samples: Sequence[Captured]) -> None:
        self.lengths = [len(sample) for sample in samples]
        self.token_ids_T = torch.cat([s.token_ids_T for s in samples])
        self.aux_TA = torch.cat([s.aux_TA for s in samples])
        self.final_TH = torch.cat([s.final_TH for s in samples])
        self.position_T = torch.cat(
            [torch.arange(len(s), device=s.aux_TA.device) + s.first_position for s in samples]
        )
        self.mask_T = torch.cat([s.loss_mask_T for s in samples])
        inside_T = torch.cat(
            [torch.arange(len(s), device=s.aux_TA.device) < len(s) - 2 for s in samples]
        )
        learned_T = self.mask_T.roll(-2) & inside_T
        self.chains = Chains(learned_T.nonzero()[:, 0], self.lengths)

    def learned(self, step: int) -> torch.Tensor:
        """Return which chains [C] predict, in pass `step`, a learned token of their own sample."""
        place = self.chains.starts + 2 + step
        inside = place < self.chains.ends
        return inside & self.mask_T[place.clamp(max=len(self.mask_T) - 1)]
