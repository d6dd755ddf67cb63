"""What a worker does when its states cannot be kept. No engine is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tlt.vllm.worker import AdaptiveWorker


class Writer:
    num_written = 0
    num_dropped = 0
    buffer = SimpleNamespace(window=lambda *args: args)

    def write(self, sample_id: str, rl_step: int, captured: Any) -> None:
        self.num_written += 1

    def missing(self, sample_id: str) -> None:
        self.num_dropped += 1


class Recorder:
    """Finds the states of one request only, and cannot record an engine step."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.works = True

    def take(self, name: str, token_ids: Any, window: Any, then: Callable[[Any], None]) -> None:
        then(object() if name == "found" else None)

    def drop(self, request_ids: Any) -> None:
        self.dropped += request_ids

    def stop(self) -> None:
        self.works = False


def fail(*args: Any) -> None:
    raise ValueError("a step of a strange shape")


def test_states_that_cannot_be_kept_are_counted_and_end_no_engine() -> None:
    worker: Any = AdaptiveWorker.__new__(AdaptiveWorker)
    worker._recorder, worker._writer = Recorder(), Writer()
    worker._runner = SimpleNamespace(record=fail)
    assert worker.tlt_keep_states("found", "sample", 1, [3]) == (1, 0)
    assert worker.tlt_keep_states("lost", "another", 1, [3]) == (1, 1)
    assert worker.tlt_keep_states("found", None, 1, [3]) == (1, 1)
    assert worker._recorder.dropped == ["found"]
    worker._record(None)
    assert not worker._recorder.works
