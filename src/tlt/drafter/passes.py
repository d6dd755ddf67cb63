"""Samples packed into a row, the drafter's passes over it, and the policy's logits.

Training and evaluation share these computations, so both round in the same way. Each pass can be
interrupted: `check_stop` raises `Interrupted` in the forward or in the backward pass.

Shapes: V vocabulary, H hidden, T positions of a row, A fused states (3H), C chains, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tlt.drafter.eagle3.model import Chains, Eagle3Drafter
from tlt.states.captured import Captured

ShouldStop = Callable[[], bool]


class Interrupted(Exception):
    """An optimizer step or an evaluation was interrupted; the trainer's state is unchanged."""


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


class DraftPasses:
    """A drafter together with the head and embedding of the policy that it drafts for."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        head_VH: torch.Tensor,
        embedding_VH: torch.Tensor,
        num_draft_tokens: int,
        bfloat16: bool,
    ) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self._bfloat16 = bfloat16
        self.follow(head_VH, embedding_VH)

    def follow(self, head_VH: torch.Tensor, embedding_VH: torch.Tensor) -> None:
        """Use this policy's head and embedding from now on."""
        # A product with a bfloat16 head would be computed in bfloat16.
        self.head_VH = head_VH.detach() if self._bfloat16 else head_VH.detach().float()
        self.embedding_VH = embedding_VH.detach()

    @property
    def device(self) -> torch.device:
        """Device of the policy's head, and of everything else."""
        return self.head_VH.device

    def unroll(self, row: Row, should_stop: ShouldStop = lambda: False) -> list[torch.Tensor]:
        """Return the drafter's output states [C, H] of every pass over the chains of a row."""
        return self.drafter.unroll(
            row.aux_TA.float(),
            self.embedding_VH[row.token_ids_T.roll(-1)].float(),
            row.position_T,
            row.chains,
            self.num_draft_tokens,
            lambda hidden: check_stop(hidden, should_stop),
        )

    def project(self, final_nH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, V] that a head gives to the policy's last hidden states."""
        return (final_nH.to(head_VH.dtype) @ head_VH.T).float()

    def autocast(self) -> torch.autocast:
        """Return the context in which passes run: matrix products in bfloat16 where configured."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)


def check_stop(tensor: torch.Tensor, should_stop: ShouldStop) -> None:
    """Raise `Interrupted` if told to stop, now or when the backward pass reaches `tensor`."""

    def check(_: object = None) -> None:
        if should_stop():
            raise Interrupted

    check()
    if tensor.requires_grad:
        tensor.register_hook(check)
