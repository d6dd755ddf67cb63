"""The engine's own rules, without vLLM."""

import time

import pytest

from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import EngineError
from tlt.rollout.engine import RolloutEngine, stream_seed


def engine() -> RolloutEngine:
    return RolloutEngine(EngineConfig(model="m", stall_timeout_s=5.0))


def test_a_hung_step_is_noticed() -> None:
    hung = engine()
    request = SampleRequest("a", (1,), SamplingSpec(max_tokens=1))
    hung._in_flight["a"] = (request, 0.0, 0.0)
    assert hung.take_finished(timeout_s=0) == []
    hung._turn_started_s = time.monotonic() - 6.0
    with pytest.raises(EngineError, match="one step for 6 s"):
        hung.take_finished(timeout_s=0)
    hung._paused = True  # a paused engine is not hung
    assert hung.take_finished(timeout_s=0) == []


def test_a_failed_engine_says_why() -> None:
    failed = engine()
    failed._fail(RuntimeError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        failed.take_finished(timeout_s=0)


def test_no_two_engines_draw_the_same_numbers() -> None:
    """vLLM's default seed is the same for all: groups spread over engines would repeat samples."""
    names = [f"engine-{index}" for index in range(64)]
    assert len({stream_seed(None, name) for name in names}) == 64
    seeds = [stream_seed(7, name) for name in names]
    assert len(set(seeds)) == 64
    assert seeds == [stream_seed(7, name) for name in names]
    assert all(0 <= seed < 2**32 for seed in seeds)
