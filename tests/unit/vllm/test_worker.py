"""What a worker does when its states cannot be kept. No engine is needed."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from tlt.vllm.worker import AdaptiveWorker


class BrokenWriter:
    num_written = 0
    num_dropped = 0

    def write(self, sample_id: str, rl_step: int, captured: Any) -> None:
        raise ValueError("a sample of a strange shape")

    def missing(self, sample_id: str) -> None:
        self.num_dropped += 1


class Recorder:
    def take(self, request_id: str, token_ids: list[int]) -> object:
        return object()


def test_states_that_cannot_be_kept_end_no_engine() -> None:
    worker: Any = AdaptiveWorker.__new__(AdaptiveWorker)
    worker._recorder, worker._writer = Recorder(), BrokenWriter()
    assert worker.tlt_keep_states("r", "sample", 1, [3]) == (0, 1)
    assert worker._recorder is None
    assert worker.tlt_keep_states("r", "another", 1, [3]) == (0, 2)
    assert worker.tlt_keep_states("r", None, 1, [3]) == (0, 2)
