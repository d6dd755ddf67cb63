"""Stores captured states in the node's buffer, beside the work that computed them."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

from tlt.states.buffer import SampleBuffer
from tlt.states.captured import Captured

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Threads that write at the same time."""
WAITING_BYTES = 512 * 2**20
"""Limit of the states waiting to be stored. Beyond it the writer drops states rather than slow
the work down."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Numbers of captured samples since the start."""

    num_samples: int = 0
    """Samples in the buffer, or once in the buffer."""
    num_dropped: int = 0
    """Samples whose states were lost."""
    num_bytes: int = 0
    """Size of the node's buffer."""


class StateWriter:
    """Writes to the node's buffer in threads; drops states when they fall behind."""

    def __init__(self, buffer: SampleBuffer) -> None:
        self.buffer = buffer
        self.num_written = 0
        self.num_dropped = 0
        self._waiting_bytes = 0
        self._queue: queue.SimpleQueue[tuple[str, int, Captured]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        for number in range(NUM_THREADS):
            name = f"tlt-capture-{number}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def write(self, sample_id: str, rl_step: int, captured: Captured) -> None:
        """Hand a sample over to the threads. Only the window that the buffer keeps has to wait."""
        captured = self.buffer.capped(sample_id, rl_step, captured)
        with self._lock:
            if self._waiting_bytes + captured.num_bytes > WAITING_BYTES:
                self._drop(sample_id)
                return
            self._waiting_bytes += captured.num_bytes
        self._queue.put((sample_id, rl_step, captured))

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
            sample_id, rl_step, captured = self._queue.get()
            try:
                is_stored: bool | None = self.buffer.put(sample_id, rl_step, captured)
            except Exception:  # a full disk must not end a training run
                logger.exception("captured states of %s could not be stored", sample_id)
                is_stored = None
            with self._lock:
                if is_stored is None:
                    self._drop(sample_id)
                self.num_written += bool(is_stored)
                self._waiting_bytes -= captured.num_bytes
                self._lock.notify_all()
