"""Ranks that train one drafter together: each learns its share of the rows of an optimizer step.

Gradients add up in the order of the rows, on any number of ranks. One rank that learns the same
rows gets the same sum, bit for bit. Every rank then makes the same optimizer step, so all hold the
same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class OneRank:
    """A trainer on its own: its backward passes add up the gradients."""

    rank = 0
    size = 1

    def agree(self, *values: float) -> list[float]:
        """Return the values of the first rank, once all ranks have come."""
        return list(values)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the gradients of one row of every rank."""

    def finish(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the tensors to the sum of everything added."""


class Ranks(OneRank):
    """The ranks of torch's default process group. All make the same calls, in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._sum: torch.Tensor | None = None
        """This rank's part of the sum: parameters are cut into as many parts as there are ranks."""

    def agree(self, *values: float) -> list[float]:
        assert values, "a sum of no values cannot be agreed on"
        own = torch.tensor(values, dtype=torch.float64)
        shared = (own if self.rank == 0 else torch.zeros_like(own)).to(self._device)
        dist.all_reduce(shared)
        return shared.tolist()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % self.size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        for part in parts.chunk(self.size):
            self._sum = part.clone() if self._sum is None else self._sum.add_(part)
        for tensor in tensors:
            tensor.zero_()

    def finish(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self._sum is not None
        whole = self._sum.new_empty(self.size * len(self._sum))
        dist.all_gather_single(whole, self._sum)
        self._sum = None
        begin = 0
        for tensor in tensors:
            tensor.copy_(whole[begin : begin + tensor.numel()].view_as(tensor))
            begin += tensor.numel()
