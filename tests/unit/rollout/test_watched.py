"""Samples that the pool waits for and no engine has."""

import pytest

from tlt.errors import EngineError
from tlt.rollout.watched import Progress


def test_a_sample_that_is_missing_twice_is_lost() -> None:
    now_s = 0.0
    progress = Progress(every_s=10.0, clock=lambda: now_s)
    assert not progress.is_due(has_delivered=False)
    now_s = 10.0
    assert progress.is_due(has_delivered=False)
    progress.compare("engine-0", {"a", "b"}, ["a"])  # b may be on its way
    assert not progress.is_due(has_delivered=False)
    now_s = 20.0
    assert progress.is_due(has_delivered=False)
    progress.compare("engine-0", {"a", "b", "c"}, ["a", "b"])
    now_s = 30.0
    assert progress.is_due(has_delivered=False)
    with pytest.raises(EngineError, match="waits for 1 samples of engine-0, such as c"):
        progress.compare("engine-0", {"a", "c"}, ["a"])


def test_an_engine_that_delivers_is_not_asked() -> None:
    now_s = 0.0
    progress = Progress(every_s=10.0, clock=lambda: now_s)
    for _ in range(3):
        now_s += 9.0
        assert not progress.is_due(has_delivered=True)
    now_s += 9.0
    assert not progress.is_due(has_delivered=False)
