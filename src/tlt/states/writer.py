"""Stores captured states in the node's buffer, beside the work that computed them."""

from __future__ import annotations

import logging
import queue
import threading

from tlt.states.buffer import SampleBuffer
from tlt.states.captured import Captured

logger = logging.getLogger(__name__)

WAITING_BYTES = 512 * 2**20
"""Limit of the states waiting to be stored. Beyond it the writer drops states rather than slow
the work down."""


class StateWriter:
    """Writes to the node's buffer in a thread; drops states when it falls behind."""

    def __init__(self, buffer: SampleBuffer) -> None:
        self.buffer = buffer
        self.num_written = 0
        self.num_dropped = 0
        self._waiting_bytes = 0
        self._queue: queue.SimpleQueue[tuple[str, int, Captured]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        threading.Thread(target=self._run, name="tlt-capture", daemon=True).start()

    def write(self, sample_id: str, rl_step: int, captured: Captured) -> None:
        """Hand a sample over to the thread. Only the window that the buffer keeps has to wait."""
        captured = self.buffer.capped(sample_id, rl_step, captured)
        with self._lock:
            if self._waiting_bytes + captured.num_bytes > WAITING_BYTES:
                self._drop(sample_id)
                return
            self._waiting_bytes += captured.num_bytes
        self._queue.put((sample_id, rl_step, captured))

    def drain(self) -> None:
        """Wait until everything handed over is stored."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting_bytes == 0)

    def _drop(self, sample_id: str) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:  # the first, second, fourth, eighth ...
            logger.warning(
                "the states of %d samples were not stored, the last of them %s: the buffer's "
                "writer fell behind or failed",
                self.num_dropped,
                sample_id,
            )

    def _run(self) -> None:
        while True:
            sample_id, rl_step, captured = self._queue.get()
            try:
                self.num_written += self.buffer.put(sample_id, rl_step, captured)
            except Exception:  # a full disk must not end a training run
                logger.exception("captured states of %s could not be stored", sample_id)
                self._drop(sample_id)
            with self._lock:
                self._waiting_bytes -= captured.num_bytes
                self._lock.notify_all()
