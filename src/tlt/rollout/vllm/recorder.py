"""Keeps the hidden states of the engine's own passes, for the drafter to learn from.

Every engine step computes, for the tokens it reads, the three states that an EAGLE-3 drafter is fed
and the last one, which the logits come from. They are copied out step by step, and when a sample
has ended they make up a `Captured`. So all samples are learned from, also those of groups without
a signal, and already while the rest of their rollout goes on.

A position that is read again (a rejected draft, a preemption) overwrites what was kept of it, so
nothing here needs to know what was accepted. What a request does not read, because the prefix cache
has it, was read by the request that put it there: of those, the states of the prompt are kept until
the policy changes. The last token of a sample is never read; no draft is learned from it.

Shapes: T positions, S the width of all states (4H).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tlt.states.captured import Captured


@dataclass(slots=True)
class Reading:
    """What one request has read so far."""

    prompt: Any
    """Its tokens, a numpy array."""
    first: int
    """Where it began: what comes before was in the prefix cache."""
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Positions and states, in the order in which they were read."""


class StateRecorder:
    """The states of the requests that an engine runs."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, Reading] = {}
        self._readers: dict[bytes, Reading] = {}
        """Who has read the last block of a prefix of whole blocks."""

    def record(
        self,
        batch: Any,
        num_read: Mapping[str, int],
        aux: Sequence[torch.Tensor],
        final_TH: torch.Tensor,
    ) -> None:
        """Copy the states of one step, whose rows are those of the requests in vLLM's batch."""
        begin = 0
        for row, request_id in enumerate(batch.req_ids):
            end = begin + num_read[request_id]
            position = int(batch.num_computed_tokens_cpu[row])
            reading = self._running.get(request_id)
            if reading is None:
                prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]].copy()
                reading = self._running[request_id] = Reading(prompt, position)
                for size in range(position + self._block_size, len(prompt) + 1, self._block_size):
                    self._readers.setdefault(prompt[:size].tobytes(), reading)
            state_TS = torch.cat([*(state[begin:end] for state in aux), final_TH[begin:end]], -1)
            reading.parts.append((position, state_TS))
            begin = end

    def take(self, request_id: str, token_ids: Sequence[int]) -> Captured | None:
        """All states of a sample that has ended; None where some are missing."""
        reading = self._running.pop(request_id, None)
        if reading is None:
            return None
        num_prompt = len(reading.prompt)
        wanted = len(token_ids) - 1
        first, state_TS = self._states(reading, wanted)
        # Others may have read the prompt after it; of the response nothing is needed any more.
        reading.parts = [part for part in reading.parts if part[0] < num_prompt]
        if state_TS is None:
            return None
        unread = state_TS.new_zeros(1, state_TS.shape[1])
        state_TS = torch.cat([state_TS, unread])
        width = state_TS.shape[1] // 4
        return Captured(
            token_ids_T=torch.tensor(token_ids[first:]),
            loss_mask_T=torch.arange(first, len(token_ids)) >= num_prompt,
            aux_TA=state_TS[:, : 3 * width],
            final_TH=state_TS[:, 3 * width :],
            first_position=first,
        )

    def clear(self) -> None:
        """Nothing of another policy may be mixed in."""
        self._running.clear()
        self._readers.clear()

    def _states(self, reading: Reading, end: int) -> tuple[int, torch.Tensor | None]:
        """From where on everything is known, and the states from there to `end`."""
        first, before = reading.first, None
        if first:
            earlier = self._readers.get(reading.prompt[:first].tobytes())
            if earlier is not None:
                first, before = self._states(earlier, first)
            if before is None:
                first = reading.first
        states = reading.parts[0][1]
        state_TS = states.new_empty(end - first, states.shape[1])
        is_known: Any = np.zeros(end - first, dtype=bool)
        if before is not None:
            state_TS[: len(before)] = before
            is_known[: len(before)] = True
        for position, part in reading.parts:
            begin = position - first
            stop = min(begin + len(part), end - first)
            if begin < stop:
                state_TS[begin:stop] = part[: stop - begin]
                is_known[begin:stop] = True
        return (first, state_TS) if is_known.all() else (first, None)
