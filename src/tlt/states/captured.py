"""A sample with the hidden states that the policy computed over it: what drafters learn from.

Shapes: T positions, A fused states (3H), H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Offer:
    """A sample that can be trained on now."""

    num_tokens: int
    weight: float
    """Chance of being drawn, relative to other samples."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One sample. Entry t of every tensor belongs to token t: states are those after reading it."""

    token_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    """True for tokens that the policy generated: engines draft only these."""
    aux_TA: torch.Tensor
    """The fused hidden states that the drafter reads."""
    final_TH: torch.Tensor
    """The policy's last hidden state, normed: its head times this gives the logits of token t+1."""
    first_position: int = 0
    """Position of the first token in the policy's context: above 0 for a window."""

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        aux_TA: torch.Tensor,
        final_TH: torch.Tensor,
        first_position: int = 0,
    ) -> Captured:
        """Combine a sample with its hidden states, or with the states of a window."""
        part = slice(first_position, first_position + len(aux_TA))
        token_ids = torch.tensor([*prompt_ids, *response_ids][part])
        mask = torch.arange(len(prompt_ids) + len(response_ids))[part] >= len(prompt_ids)
        return cls(token_ids, mask, aux_TA, final_TH, first_position)

    def __len__(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_chains(self) -> int:
        """Number of draft chains: positions whose token after the next one is learned."""
        return int(self.loss_mask_T[2:].sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of the hidden states."""
        return self.aux_TA.nbytes + self.final_TH.nbytes

    def to(self, device: torch.device) -> Captured:
        """Return the sample on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def window(self, begin: int, end: int) -> Captured:
        """Return part of the sample, at its true positions, without the context before it."""
        part = self._each(lambda tensor: tensor[begin:end])
        return replace(part, first_position=self.first_position + begin)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Captured:
        ids_T, mask_T = change(self.token_ids_T), change(self.loss_mask_T)
        return Captured(
            ids_T, mask_T, change(self.aux_TA), change(self.final_TH), self.first_position
        )

    def focused(self, begin: int, end: int) -> Captured:
        """Return the sample up to `end`, in which only tokens from `begin` on are learned.

        Drafts in the window see all the context before it, as in an engine.
        """
        part = self.window(0, end)
        later_T = torch.arange(len(part), device=part.loss_mask_T.device) >= begin
        return replace(part, loss_mask_T=part.loss_mask_T & later_T)

    @property
    def first_learned(self) -> int:
        """Index of the first learned token."""
        return int(self.loss_mask_T.to(torch.uint8).argmax())


class HostCopy:
    """Tensors on their way to the host, while their device works. CPU tensors are not copied.

    The copy begins when the device has computed the tensors, and work that was queued after them
    does not delay it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._done = list(tensors), None
        if not tensors[0].is_cuda:
            return
        stream = _copy_stream(tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._tensors = [_to_host(tensor, stream) for tensor in tensors]
            self._done = torch.cuda.Event(blocking=True)  # waiting for it takes no core
            self._done.record(stream)

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host when the copy has ended."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _to_host(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Start a copy to the host on the current stream, `stream`."""
    tensor.record_stream(stream)  # keeps the memory until the copy has ended
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


@torch.no_grad()
def capture(
    policy: Any,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> Captured:
    """Run `policy` (a Hugging Face causal LM) over one sample and keep its hidden states.

    In a training run, engines or learners provide the states of their own passes instead.
    """
    ids = torch.tensor([list(token_ids)], device=policy.device)
    states = policy.model(ids, output_hidden_states=True, use_cache=False)
    hidden = states.hidden_states
    return Captured(
        token_ids_T=ids[0],
        loss_mask_T=torch.arange(len(token_ids), device=policy.device) >= num_prompt_tokens,
        aux_TA=torch.cat([hidden[i][0] for i in aux_layer_ids], -1).to(dtype),
        final_TH=states.last_hidden_state[0].to(dtype),
    )
