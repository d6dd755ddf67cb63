"""Hidden states of the engine's own steps, kept for the drafter's training.

For each token that it reads, an engine step computes the three hidden states that feed an EAGLE-3
drafter, and the final one, from which the logits follow. The recorder copies them after every
engine step. When a sample ends, they form a `Captured`. So the drafter learns from all samples,
even those of groups without a signal, while the rest of the rollout still runs.

Recomputed positions (after a rejected draft or a preemption) overwrite their stored states, so the
recorder need not know which tokens were accepted. A request that hits the prefix cache reuses the
states of the request that filled it; the recorder keeps the states of prompts until the policy
changes. No engine step reads the last token of a sample, and no draft is learned from it.

vLLM's V1 runner knows the positions of an engine step on the host (`record`). Its V2 runner knows
them only on the device. There the states and positions of an engine step go to the host on a
stream of their own (`add`), and nothing waits for them before the sample has ended.

Shapes: T positions, B requests of the batch, S the width of all states (4H).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tlt.states.captured import Captured


class Part(Protocol):
    """The states of one request from one engine step."""

    @property
    def position(self) -> int:
        """Position of the first state."""

    @property
    def state_TS(self) -> torch.Tensor:
        """States of consecutive positions."""


@dataclass(frozen=True, slots=True)
class Known:
    """States at a position that the host knows."""

    position: int
    state_TS: torch.Tensor


class StepCopy:
    """The states of one engine step on their way to the host."""

    def __init__(self, stream: Any, first_B: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        state_TS = torch.cat(list(states), -1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._first_B = _to_host(first_B, stream)
            self._state_TS = _to_host(state_TS, stream)
            self._done = torch.cuda.Event()
            self._done.record(stream)
        self._parts: list[Copied] = []

    def part(self, row: int, begin: int, end: int) -> Copied:
        """Return the states of one request, which will be those of some rows."""
        self._parts.append(Copied(self, row, begin, end))
        return self._parts[-1]

    def is_done(self) -> bool:
        """Return whether the copy has ended."""
        return bool(self._done.query())

    def settle(self) -> None:
        """Give every request states of its own; wait for the copy.

        Otherwise one long request would keep the states of all others of its engine steps.
        """
        self._done.synchronize()
        for part in self._parts:
            part.take(int(self._first_B[part.row]), self._state_TS[part.begin : part.end].clone())
        self._parts.clear()


def _to_host(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Start a copy to the host on the current stream, `stream`."""
    tensor.record_stream(stream)  # keeps the memory until the copy has ended
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return out.copy_(tensor, non_blocking=True)


class Copied:
    """States at a position that only the device knew."""

    def __init__(self, step: StepCopy, row: int, begin: int, end: int) -> None:
        self._step: StepCopy | None = step
        self.row, self.begin, self.end = row, begin, end
        self._position = 0
        self._state_TS: torch.Tensor | None = None

    def take(self, position: int, state_TS: torch.Tensor) -> None:
        """Keep the states, and let go of those of other requests."""
        self._position, self._state_TS, self._step = position, state_TS, None

    @property
    def position(self) -> int:
        self._settle()
        return self._position

    @property
    def state_TS(self) -> torch.Tensor:
        self._settle()
        assert self._state_TS is not None
        return self._state_TS

    def _settle(self) -> None:
        if self._step is not None:
            self._step.settle()


@dataclass(slots=True)
class Reading:
    """The hidden states of one request so far."""

    prompt: Any
    """Tokens of the prompt, a numpy array."""
    first: int
    """First position that the request read; earlier ones were in the prefix cache."""
    parts: list[Part] = field(default_factory=list)
    """States of each engine step, in order."""


class StateRecorder:
    """The hidden states of all running requests of an engine."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, Reading] = {}
        self._readers: dict[bytes, Reading] = {}
        """The first request that read the last block of each prefix of whole blocks."""
        self._stream: Any = None
        self._copies: deque[StepCopy] = deque()
        """Copies that may not have ended, oldest first."""

    def begin(self, request_id: str, prompt: Any, first: int) -> Reading:
        """Return the states of a request so far; a new one begins to read at position `first`."""
        reading = self._running.get(request_id)
        if reading is None:
            reading = self._running[request_id] = Reading(prompt, first)
            for size in range(first + self._block_size, len(prompt) + 1, self._block_size):
                self._readers.setdefault(prompt[:size].tobytes(), reading)
        return reading

    def add(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int],
        first_B: torch.Tensor,
        states: Sequence[torch.Tensor],
    ) -> None:
        """Copy the states of one engine step to the host. Its requests have begun.

        The rows of request b are those from `starts[b]` to `starts[b + 1]`. Its first position is
        `first_B[b]`.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        num_rows = starts[len(request_ids)]
        while self._copies and self._copies[0].is_done():
            self._copies.popleft().settle()
        copy = StepCopy(self._stream, first_B, [state[:num_rows] for state in states])
        self._copies.append(copy)
        for row, request_id in enumerate(request_ids):
            if (reading := self._running.get(request_id)) is not None:
                reading.parts.append(copy.part(row, starts[row], starts[row + 1]))

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
            prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
            reading = self._running.get(request_id) or self.begin(
                request_id, prompt.copy(), position
            )
            state_TS = torch.cat([*(state[begin:end] for state in aux), final_TH[begin:end]], -1)
            reading.parts.append(Known(position, state_TS))
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
            reading.parts = [part for part in reading.parts if part.position < num_prompt]

    def clear(self) -> None:
        """Drop all states, because the policy changes."""
        self._running.clear()
        self._readers.clear()
        self._copies.clear()

    def _states(self, reading: Reading, end: int) -> tuple[int, torch.Tensor | None]:
        """Return the first known position, and all states from there to `end`, or None."""
        first, before = reading.first, None
        if first:
            earlier = self._readers.get(reading.prompt[:first].tobytes())
            if earlier is not None:
                first, before = self._states(earlier, first)
            if before is None:
                first = reading.first
        states = reading.parts[0].state_TS
        state_TS = states.new_empty(end - first, states.shape[1])
        is_known: Any = np.zeros(end - first, dtype=bool)
        if before is not None:
            state_TS[: len(before)] = before
            is_known[: len(before)] = True
        for part in reading.parts:
            # A preempted request may have read its prefix anew, which others had read before.
            part_TS = part.state_TS[max(0, first - part.position) :]
            begin = max(0, part.position - first)
            stop = min(begin + len(part_TS), end - first)
            if begin < stop:
                state_TS[begin:stop] = part_TS[: stop - begin]
                is_known[begin:stop] = True
        return (first, state_TS) if is_known.all() else (first, None)
