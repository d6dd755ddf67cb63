"""Hidden states of the engine's own steps, kept for the drafter's training.

For each token that it reads, an engine step computes the three hidden states that feed an EAGLE-3
drafter, and the final one, from which the logits follow. The recorder copies them after every
engine step. When a sample ends, they form a `Captured`. So the drafter learns from all samples,
even those of groups without a signal, while the rest of the rollout still goes on.

Recomputed positions (after a rejected draft or a preemption) overwrite their stored states, so the
recorder need not know which tokens were accepted. A request that hits the prefix cache reuses the
states of the request that filled it; the recorder keeps the states of prompts until the policy
changes. No engine step reads the last token of a sample, and no draft is learned from it.

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
    """The hidden states of one request so far."""

    prompt: Any
    """Tokens of the prompt, a numpy array."""
    first: int
    """First position that the request read; earlier ones were in the prefix cache."""
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """First position and states of each engine step, in order."""


class StateRecorder:
    """The hidden states of all running requests of an engine."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, Reading] = {}
        self._readers: dict[bytes, Reading] = {}
        """The first request that read the last block of each prefix of whole blocks."""

    def record(
        self,
        batch: Any,
        num_read: Mapping[str, int],
        aux: Sequence[torch.Tensor],
        final_TH: torch.Tensor,
    ) -> None:
        """Copy the states of one engine step, whose rows follow the requests of vLLM's batch."""
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
        """Return and drop the states of an ended sample; return None if some are missing."""
        reading = self._running.get(request_id)
        if reading is None:
            return None
        num_prompt = len(reading.prompt)
        wanted = len(token_ids) - 1
        first, state_TS = self._states(reading, wanted)
        self.drop(request_id)
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

    def drop(self, request_id: str) -> None:
        """Drop the states of a response. Later requests may need those of its prompt."""
        if (reading := self._running.pop(request_id, None)) is not None:
            num_prompt = len(reading.prompt)
            reading.parts = [part for part in reading.parts if part[0] < num_prompt]

    def clear(self) -> None:
        """Drop all states, because the policy changes."""
        self._running.clear()
        self._readers.clear()

    def _states(self, reading: Reading, end: int) -> tuple[int, torch.Tensor | None]:
        """Return the first known position, and all states from there to `end`, or None."""
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
