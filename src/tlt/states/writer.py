"""Stores captured states in the node's buffer, in parallel to the work that computed them.

States wait in host memory until a thread has stored them. What may wait is bounded: beyond the
bound the writer drops states rather than slow the work down.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from tlt.states.buffer import SampleBuffer
from tlt.states.captured import Captured, HostCopy

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Threads that write at the same time."""
WAITING_BYTES = 512 * 2**20
"""Limit of the states of single samples that wait."""

Text = tuple[str, Sequence[int], Sequence[int]]
"""A sample's id, prompt and response."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Numbers of captured samples since the start."""

    num_samples: int = 0
    """Samples in the buffer, or once in the buffer."""
    num_dropped: int = 0
    """Samples whose states were lost."""
    num_bytes: int = 0
    """Size of the node's buffer."""


@dataclass(slots=True)
class _Memory:
    """Memory of waiting samples. The last sample frees it."""

    num_bytes: int
    num_samples: int = 1


class StateWriter:
    """Writes to the node's buffer in threads; drops states when they fall behind."""

    def __init__(self, buffer: SampleBuffer, waiting_rows: int = 0) -> None:
        """Let at most the bytes of `waiting_rows` of the largest rows wait, if rows are written."""
        self.buffer = buffer
        self.num_written = 0
        self.num_dropped = 0
        self._waiting_bytes = 0
        self._waiting_rows = waiting_rows
        self._largest_row = 0
        self._queue: queue.SimpleQueue[tuple[str, int, Callable[[], Captured], _Memory]]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Condition()
        for number in range(NUM_THREADS):
            name = f"tlt-capture-{number}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def write(self, sample_id: str, rl_step: int, captured: Captured) -> None:
        """Hand a sample over to the threads. Only the window that the buffer keeps has to wait."""
        captured = self.buffer.capped(sample_id, rl_step, captured)
        memory = _Memory(captured.num_bytes)
        if self._has_room(sample_id, memory, WAITING_BYTES):
            self._queue.put((sample_id, rl_step, lambda: captured, memory))

    def write_row(
        self,
        rl_step: int,
        texts: Sequence[Text],
        unshare_E: torch.Tensor | None,
        aux_TA: torch.Tensor,
        final_TH: torch.Tensor,
    ) -> None:
        """Hand over the samples of a packed row; their states are copied during later work.

        `unshare_E` is the row index of every token of every sample, one sample after another; None
        if the row has them in this order. If there is no room for the row, the longest samples wait
        with the window that the buffer keeps, and the rest are dropped.
        """
        row = _Memory(aux_TA.nbytes + final_TH.nbytes, len(texts))
        self._largest_row = max(self._largest_row, row.num_bytes)
        limit = self._waiting_rows * self._largest_row
        starts = [0, *accumulate(len(prompt) + len(response) for _, prompt, response in texts)]
        parts = list(zip(texts, starts, starts[1:], strict=False))
        if self._has_room("", row, limit):
            index = [] if unshare_E is None else [unshare_E]
            if whole := self._copy(lambda: [aux_TA, final_TH, *index], row, texts):
                for text, begin, end in parts:
                    get = partial(_put_together, whole, text, begin, end)
                    self._queue.put((text[0], rl_step, get, row))
            return
        for text, begin, end in sorted(parts, key=lambda part: part[1] - part[2]):
            first, stop = self.buffer.window(text[0], rl_step, end - begin, len(text[1]))
            window = _Memory(row.num_bytes * (stop - first) // len(aux_TA))
            if self._has_room(text[0], window, limit):
                rows = slice(begin + first, begin + stop)
                gather = partial(_gather, rows, unshare_E, aux_TA, final_TH)
                if copy := self._copy(gather, window, [text]):
                    get = partial(_put_together, copy, text, 0, stop - first, first)
                    self._queue.put((text[0], rl_step, get, window))

    def _copy(
        self, tensors: Callable[[], list[torch.Tensor]], memory: _Memory, texts: Sequence[Text]
    ) -> HostCopy | None:
        """Start a copy of tensors; if memory is short, the update continues without it."""
        try:
            return HostCopy(tensors())
        except RuntimeError:  # torch has no memory, on the device or the host
            logger.exception("the states of %d samples could not be copied", len(texts))
            with self._lock:
                self._waiting_bytes -= memory.num_bytes
                for text in texts:
                    self._drop(text[0])
                self._lock.notify_all()
            return None

    def _has_room(self, sample_id: str, memory: _Memory, limit: int) -> bool:
        """Return whether the memory may be taken, and take it; drop the sample otherwise."""
        with self._lock:
            has_room = self._waiting_bytes + memory.num_bytes <= limit
            if has_room:
                self._waiting_bytes += memory.num_bytes
            elif sample_id:
                self._drop(sample_id)
        return has_room

    def missing(self, sample_id: str) -> None:
        """Count a sample as dropped whose states were not captured."""
        with self._lock:
            self._drop(sample_id)

    def drain(self) -> None:
        """Wait until everything handed over is stored."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting_bytes == 0)

    def stored(self) -> Stored:
        """Return the counts so far."""
        return Stored(self.num_written, self.num_dropped, self.buffer.num_bytes())

    def _drop(self, sample_id: str) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:  # the first, second, fourth, eighth ...
            logger.warning(
                "the states of %d samples were not stored, the last of them %s: the buffer's "
                "writer fell behind or failed, or states were missing",
                self.num_dropped,
                sample_id,
            )

    def _run(self) -> None:
        while True:
            sample_id, rl_step, get, memory = self._queue.get()
            try:
                is_stored: bool | None = self.buffer.put(sample_id, rl_step, get())
            except Exception:  # a full disk must not end a training run
                logger.exception("captured states of %s could not be stored", sample_id)
                is_stored = None
            with self._lock:
                if is_stored is None:
                    self._drop(sample_id)
                self.num_written += bool(is_stored)
                memory.num_samples -= 1
                if not memory.num_samples:
                    self._waiting_bytes -= memory.num_bytes
                self._lock.notify_all()
            del get  # its memory would stay until the next sample comes


def _gather(
    rows: slice, unshare_E: torch.Tensor | None, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """Return copies of rows, so the memory of other rows can be freed."""
    return [
        tensor[rows].clone() if unshare_E is None else tensor[unshare_E[rows]] for tensor in tensors
    ]


def _put_together(
    copy: HostCopy, text: Text, begin: int, end: int, first_position: int = 0
) -> Captured:
    """Return a sample with the states of a range of a copy; wait for the copy."""
    aux_TA, final_TH, *unshare = copy.wait()
    part: slice | torch.Tensor = unshare[0][begin:end] if unshare else slice(begin, end)
    return Captured.of(text[1], text[2], aux_TA[part], final_TH[part], first_position)
