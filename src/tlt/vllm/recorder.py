"""Hidden states of the engine's own steps, kept for the drafter's training.

For each token that it reads, an engine step computes the three hidden states that feed an EAGLE-3
drafter, and the final one, from which the logits follow. The recorder copies them after every
engine step. When a sample ends, they form a `Captured`. So the drafter learns from all samples,
even those of groups without a signal, while the rest of the rollout still runs.

The engine's thread only starts a copy of the rows of its step, in bfloat16 and on a GPU in a
separate stream. A thread of the recorder does the rest, in the order of the calls. It knows
positions from the copy, because vLLM's V2 runner knows them only on the device.

States lie in slots of one pool, whose size is the recorder's budget. Recomputed positions (after a
rejected draft or a preemption) reuse their slots, so the recorder need not know which tokens were
accepted. A request that hits the prefix cache reuses the states of the request that filled it; the
recorder keeps the states of prompts until the policy changes. When the pool is full, the oldest
prompts of ended requests make room, then the requests with the fewest tokens: their samples are
lost. No engine step reads the last token of a sample, and no draft is learned from it.

Shapes: T rows of an engine step, B requests of the batch, P positions of a request, S the width of
all states (4H).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tlt.states.captured import Captured, HostCopy

logger = logging.getLogger(__name__)

Window = Callable[[int, int], tuple[int, int]]
"""`window(num_tokens, first_learned)` returns where the part of a sample that is stored begins and
ends."""


@dataclass(eq=False, slots=True)
class Reading:
    """A request whose states are kept."""

    num_prompt: int
    """Tokens of the prompt, without a response that another engine began."""
    blocks: list[bytes]
    """Digest of each prefix of whole blocks of what the request had to read."""
    first: int
    """First position that the request read; earlier ones were in the prefix cache."""
    row: int
    """Row of the request in the table of slots; 0 once it has ended."""
    prefixes: list[bytes]
    """Digests of the prompt's prefixes whose last block this request was the first to read."""
    kept_P: Any = ()
    """Slots of the prompt, once the request has ended."""


class StateRecorder:
    """The hidden states of an engine's requests: `num_tokens` of them, of `max_requests`.

    At most `max_waiting` rows wait for the recorder's thread. The states of an engine step that
    finds no room there are lost, and with them the samples.
    """

    def __init__(
        self, block_size: int, num_tokens: int, max_requests: int, max_len: int, max_waiting: int
    ) -> None:
        self.works = True
        """Whether the recorder still records: it stops after a fault."""
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._table_shape = max_requests + 1, max_len
        self._max_waiting = max_waiting
        self._num_given = self._num_done = 0
        """Rows given to the thread, and rows it has finished: one writer each."""
        self._clear()
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tlt-recorder", daemon=True).start()

    # --- the engine's thread ------------------------------------------------------------------

    def begin(
        self, request_id: str, token_ids: Sequence[int], first: int, num_begun: int = 0
    ) -> None:
        """Note a request that begins to read its text at position `first`, unless it is known.

        The last `num_begun` tokens of the text are a response that another engine began.
        """
        self._queue.put(partial(self._begin, request_id, token_ids, first, num_begun))

    def add(
        self,
        request_ids: Sequence[str],
        num_read: Sequence[int],
        first_B: torch.Tensor,
        states: Sequence[torch.Tensor],
    ) -> None:
        """Copy the states of one engine step. Each request read `num_read` tokens in it.

        The rows of the states follow the requests; `first_B` is the first position of each.
        """
        if not self.works:
            return
        num_read_B = np.array(num_read)
        num_rows = int(num_read_B.sum())
        if self._num_given - self._num_done + num_rows > self._max_waiting:
            self._queue.put(partial(self._lose, tuple(request_ids)))
            return
        state_TS = torch.cat([state[:num_rows].to(torch.bfloat16) for state in states], -1)
        self._num_given += num_rows
        copy = HostCopy([state_TS, first_B])
        self._queue.put(partial(self._keep, tuple(request_ids), num_read_B, copy))

    def take(
        self,
        request_id: str,
        token_ids: Sequence[int],
        window: Window,
        then: Callable[[Captured | None], None],
    ) -> None:
        """Give `then` the states of an ended sample, in the thread; None if some are missing."""
        self._queue.put(partial(self._take, request_id, token_ids, window, then))

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop the states of responses. Later requests may need the states of their prompts."""
        if request_ids:
            self._queue.put(partial(self._drop, tuple(request_ids)))

    def clear(self) -> None:
        """Drop all states, because the policy changes, and free their memory."""
        self._queue.put(self._clear)

    def stop(self) -> None:
        """Record nothing more, after a fault that is being handled."""
        logger.exception("the engine no longer records hidden states")
        self.works = False
        self.clear()

    # --- the recorder's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception:  # samples are not affected
                self.stop()
            del work  # its memory would stay until the next call

    def _clear(self) -> None:
        self._running: dict[str, Reading] = {}
        self._ended: deque[Reading] = deque()
        """Ended requests whose prompts are kept, oldest first."""
        self._readers: dict[bytes, Reading] = {}
        """The first request that read the last block of each prefix, by the prefix's digest."""
        # Untouched memory costs nothing: the pool has as many pages as it once had states.
        self._pool: Any = None
        """States in bfloat16, as 16-bit integers: numpy copies rows without OpenMP's threads. Slot
        0 takes the rows of requests that are not recorded, and so does row 0 of the table."""
        self._slot_RP: Any = np.zeros(self._table_shape, np.int32)
        self._end_R: Any = np.zeros(self._table_shape[0], np.int64)
        """Positions of each request that may have slots."""
        self._free_rows = list(range(self._table_shape[0] - 1, 0, -1))
        self._free_slots: Any = np.arange(self._num_tokens, 0, -1, dtype=np.int32)
        self._num_free = self._num_tokens

    def _begin(self, request_id: str, token_ids: Sequence[int], first: int, num_begun: int) -> None:
        known = request_id in self._running or not self._free_rows or not self.works
        # A request given up before its preemption may come back in the middle of its response.
        if known or first > len(token_ids):
            return
        blocks = _digests(token_ids, self._block_size)
        num_prompt = len(token_ids) - num_begun
        reading = Reading(num_prompt, blocks, first, self._free_rows.pop(), [])
        self._running[request_id] = reading
        for prefix in blocks[first // self._block_size : num_prompt // self._block_size]:
            if self._readers.setdefault(prefix, reading) is reading:
                reading.prefixes.append(prefix)

    def _keep(self, request_ids: Sequence[str], num_read_B: Any, copy: HostCopy) -> None:
        state_TS, first_B = (tensor.numpy() for tensor in _as_integers(copy.wait()))
        try:
            self._store(request_ids, num_read_B, first_B, state_TS)
        finally:
            self._num_done += len(state_TS)

    def _store(self, request_ids: Sequence[str], num_B: Any, first_B: Any, state_TS: Any) -> None:
        readings = [self._running.get(request_id) for request_id in request_ids]
        shift_B = first_B - (np.cumsum(num_B) - num_B)
        position_T = np.arange(len(state_TS)) + np.repeat(shift_B, num_B)
        while True:
            row_B = np.array([reading.row if reading else 0 for reading in readings])
            row_T: Any = np.repeat(row_B, num_B)
            slot_T = self._slot_RP[row_T, position_T]
            new_T = (slot_T == 0) & (row_T > 0)
            left = self._num_free - int(np.count_nonzero(new_T))
            if left >= 0:
                break
            self._make_room()
        slot_T[new_T] = self._free_slots[left : self._num_free]
        self._num_free = left
        self._slot_RP[row_T, position_T] = slot_T
        self._end_R[row_B] = np.maximum(self._end_R[row_B], first_B + num_B)
        if self._pool is None:
            pool = torch.empty(self._num_tokens + 1, state_TS.shape[1], dtype=torch.int16)
            self._pool = pool.numpy()
        self._pool[slot_T] = state_TS

    def _make_room(self) -> None:
        if self._ended:
            self._end(self._ended.popleft(), 0)
        else:
            ends = {name: self._end_R[reading.row] for name, reading in self._running.items()}
            self._lose([min(ends, key=lambda name: ends[name])])

    def _lose(self, request_ids: Sequence[str]) -> None:
        """Give up requests, and free all of their slots."""
        for request_id in request_ids:
            if (reading := self._running.pop(request_id, None)) is not None:
                self._end(reading, 0)

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (reading := self._running.pop(request_id, None)) is not None:
                self._end(reading, reading.num_prompt if reading.prefixes else 0)

    def _end(self, reading: Reading, num_kept: int) -> None:
        """Free the slots of a request except its first positions."""
        row, slot_P = reading.row, reading.kept_P
        if row:
            slot_P = self._slot_RP[row, : self._end_R[row]].copy()
            self._slot_RP[row, : self._end_R[row]] = self._end_R[row] = 0
            self._free_rows.append(row)
        reading.row, reading.kept_P = 0, slot_P[:num_kept]
        freed = slot_P[num_kept:]
        freed = freed[freed > 0]
        self._free_slots[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
        if num_kept:
            self._ended.append(reading)
            return
        for prefix in reading.prefixes:
            del self._readers[prefix]

    def _take(
        self,
        request_id: str,
        token_ids: Sequence[int],
        window: Window,
        then: Callable[[Captured | None], None],
    ) -> None:
        captured = None
        try:
            reading = self._running.get(request_id)
            if reading is not None and self.works:
                captured = self._captured(reading, token_ids, window)
                self._drop([request_id])
        finally:
            then(captured)

    def _captured(
        self, reading: Reading, token_ids: Sequence[int], window: Window
    ) -> Captured | None:
        num_prompt = reading.num_prompt
        first, slot_P = self._slots(reading, len(token_ids) - 1)
        if slot_P is None:
            return None
        begin, end = window(len(token_ids) - first, max(0, num_prompt - first))
        wanted_P = slot_P[begin:end]
        states = np.zeros((end - begin, self._pool.shape[1]), np.int16)
        np.take(self._pool, wanted_P, axis=0, out=states[: len(wanted_P)], mode="clip")
        state_PS = torch.from_numpy(states).view(torch.bfloat16)
        width = state_PS.shape[1] // 4
        return Captured.of(
            token_ids[:num_prompt],
            token_ids[num_prompt:],
            state_PS[:, : 3 * width],
            state_PS[:, 3 * width :],
            first + begin,
        )

    def _slots(self, reading: Reading, end: int) -> tuple[int, Any]:
        """Return the first known position, and the slots from there to `end`, or None."""
        own_P = (self._slot_RP[reading.row] if reading.row else reading.kept_P)[:end]
        first, slot_P = reading.first, own_P[reading.first :]
        number, rest = divmod(first, self._block_size)
        earlier = self._readers.get(reading.blocks[number - 1]) if number and not rest else None
        if earlier is not None:
            begin, before = self._slots(earlier, first)
            if before is not None:
                # A preempted request may have read its prefix again, which others had read before.
                again = own_P[begin:first]
                slot_P = np.concatenate([np.where(again > 0, again, before), slot_P])
                first = begin
        return first, slot_P if len(slot_P) == end - first and slot_P.all() else None


def _digests(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return a digest of each prefix of whole blocks, made from the previous digest and the next
    block."""
    tokens: Any = np.array(token_ids, np.int32)
    digests = [b""]
    for end in range(block_size, len(tokens) + 1, block_size):
        block = tokens[end - block_size : end].tobytes()
        digests.append(hashlib.blake2b(digests[-1] + block, digest_size=16).digest())
    return digests[1:]


def _as_integers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with 16-bit integers instead of bfloat16, which numpy does not have."""
    return [t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in tensors]
