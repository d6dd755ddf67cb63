"""Catch-up: inputs that the draft model skipped, kept until it fills its KV cache from them.

While another arm decodes, the draft model need not run. It has one layer, so its keys and values of
position t depend only on the inputs at t: the policy's hidden states at t and the token after t. It
is enough to keep these inputs, and to write the missing keys and values, in any order, before the
draft model drafts again.

The store keeps the hidden states of the policy, not the fused ones of the draft model. So an engine
step that does not draft costs no extra work, and a new drafter reads the states with its own
weights.

Everything stays on the device, and nothing here waits for the device: the number of rows of an
engine step is known without reading them. Shapes: T rows, A the width of the policy's states, S
sequences that rows pose as.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True, slots=True)
class Missed:
    """Inputs of the draft model that it skipped, one row per token."""

    owner_T: Any
    """Owner of each row, a numpy array: an id inside the store, a row of the batch once taken."""
    position_T: torch.Tensor
    """Position of each row; -1 for the row of a rejected draft, which writes nothing."""
    token_T: torch.Tensor
    """Token after each position."""
    state_TA: torch.Tensor

    def __len__(self) -> int:
        return len(self.owner_T)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.position_T, self.token_T, self.state_TA))

    def select(self, rows: Any) -> Missed:
        """Return these rows."""
        if len(rows) == len(self) and bool((rows == np.arange(len(self))).all()):
            return self
        index_T = async_tensor_h2d(rows, self.state_TA.device)
        return Missed(
            self.owner_T[rows],
            self.position_T[index_T],
            self.token_T[index_T],
            self.state_TA[index_T],
        )


class MissedInputs:
    """The skipped inputs of all requests, at most `budget_bytes` of them."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._steps: list[Missed] = []
        self._num_bytes = 0
        # Own ids, because a new request may have the name of one that has ended.
        self._owners: dict[str, int] = {}
        self._num_owners = 0

    def add(
        self,
        request_ids: Sequence[str],
        num_rows: Sequence[int],
        position_T: torch.Tensor,
        token_T: torch.Tensor,
        state_TA: torch.Tensor,
    ) -> bool:
        """Keep one engine step's rows, `num_rows` per request; return False if they do not fit.

        The store keeps the tensors: the caller passes copies of tensors that vLLM will reuse.
        """
        num_bytes = position_T.nbytes + token_T.nbytes + state_TA.nbytes
        if self._num_bytes + num_bytes > self.budget_bytes:
            return False
        for request_id in request_ids:
            if request_id not in self._owners:
                self._owners[request_id] = self._num_owners
                self._num_owners += 1
        owners = [self._owners[request_id] for request_id in request_ids]
        self._steps.append(Missed(np.repeat(owners, num_rows), position_T, token_T, state_TA))
        self._num_bytes += num_bytes
        return True

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop the rows of ended requests. The next `take` frees their memory, or the last end."""
        for request_id in request_ids:
            self._owners.pop(request_id, None)
        if not self._owners:
            self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._owners.clear()
        self._steps.clear()
        self._num_bytes = 0

    def take(self, request_ids: Sequence[str], max_rows: int) -> Iterator[Missed]:
        """Yield and drop the rows of these requests; keep the rows of others.

        A batch has at most `max_rows` rows, the limit of one engine step. Its rows are sorted by
        owner, which is the request's place in `request_ids`.
        """
        place = {
            self._owners.pop(request_id): row
            for row, request_id in enumerate(request_ids)
            if request_id in self._owners
        }
        if not place:
            return
        waiting = set(self._owners.values())
        steps, self._steps, self._num_bytes = self._steps, [], 0
        batch: list[Missed] = []
        num_rows = 0
        for step in steps:
            owners = step.owner_T.tolist()
            if kept := [row for row, owner in enumerate(owners) if owner in waiting]:
                rest = step.select(np.array(kept))
                self._steps.append(rest)
                self._num_bytes += rest.num_bytes
            if wanted := [row for row, owner in enumerate(owners) if owner in place]:
                if num_rows + len(wanted) > max_rows:
                    yield _merge(batch, place)
                    batch, num_rows = [], 0
                batch.append(step.select(np.array(wanted)))
                num_rows += len(wanted)
        if batch:
            yield _merge(batch, place)


def _merge(steps: Sequence[Missed], place: dict[int, int]) -> Missed:
    owner_T = np.array([place[o] for step in steps for o in step.owner_T.tolist()])
    merged = Missed(
        owner_T,
        torch.cat([step.position_T for step in steps]),
        torch.cat([step.token_T for step in steps]),
        torch.cat([step.state_TA for step in steps]),
    )
    return merged.select(np.argsort(owner_T, kind="stable"))


def sequences(
    missed: Missed, max_rows: int, max_sequences: int
) -> Iterator[tuple[Missed, Any, Any]]:
    """Yield taken rows in parts, as sequences of the rows of one request.

    With each part come the owner and the start of each of its sequences, then the number of rows.
    No sequence has more than `max_rows` rows, no part more than `max_sequences`.
    """
    owner_T = missed.owner_T
    first_T = np.searchsorted(owner_T, owner_T)  # first row of the same request
    start_S = np.flatnonzero((np.arange(len(missed)) - first_T) % max_rows == 0)
    for begin in range(0, len(start_S), max_sequences):
        bounds = np.append(start_S, len(missed))[begin : begin + max_sequences + 1]
        part = missed.select(np.arange(bounds[0], bounds[-1]))
        yield part, owner_T[bounds[:-1]], bounds - bounds[0]
