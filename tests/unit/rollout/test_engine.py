"""The engine's loop over a fake core, and the engine's own rules, without vLLM."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from tlt.config.rollout import EngineConfig
from tlt.contracts import (
    Finished,
    FinishReason,
    Recheck,
    Sample,
    SampleRequest,
    SamplingSpec,
    Text,
)
from tlt.errors import ConfigError, EngineError, WeightMismatch
from tlt.rollout.engine import RolloutEngine
from tlt.rollout.loop import TEXTS_S, EngineLoop, Gained
from tlt.rollout.recheck import Verdict
from tlt.vllm.core import stream_seed

LIMIT_S = 20.0
MANY = 10_000
T = TypeVar("T")


def request(sample_id: str, max_tokens: int = 1) -> SampleRequest:
    return SampleRequest(sample_id, (1,), SamplingSpec(max_tokens=max_tokens))


def recheck_of(token: int = 7, max_tokens: int = 1, policy_version: int = 0) -> Recheck:
    return Recheck(request("again", max_tokens), (token,), policy_version)


class FakeCore:
    """Generates one token per request and engine step, once the test permits the step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.admitted: list[str] = []
        self.begun: list[Text | None] = []
        self.rechecks: list[str] = []
        self.reason: FinishReason = "length"
        self.error: Exception | None = None
        self.start_error: Exception | None = None
        self.end_error: Exception | None = None
        self.num_steps = 0
        self.stopped = threading.Event()
        self.in_step = threading.Event()
        self.may_step = threading.Semaphore(0)

    def start(self) -> dict[str, Any]:
        if self.start_error:
            raise self.start_error
        return {"slots": 2}

    def admit(self, request: SampleRequest) -> None:
        self.admitted.append(request.sample_id)
        self.begun.append(request.begun)
        self.left[request.sample_id] = request.sampling.max_tokens

    def step(self) -> list[Finished]:
        self.in_step.set()
        assert self.may_step.acquire(timeout=LIMIT_S)
        self.in_step.clear()
        if self.error:
            raise self.error
        self.num_steps += 1
        self.left = {sample_id: left - 1 for sample_id, left in self.left.items()}
        ended = [sample_id for sample_id, left in self.left.items() if left == 0]
        for sample_id in ended:
            del self.left[sample_id]
        return [Finished(sample_id, (7,), (-0.5,), self.reason, 0.0) for sample_id in ended]

    def gained(self) -> list[Gained]:
        return [(sample_id, 0, (7,), (-0.5,)) for sample_id in self.left]

    def begin_recheck(self, recheck: Recheck) -> None:
        self.rechecks.append("begun")
        self.left[recheck.request.sample_id] = recheck.request.sampling.max_tokens

    def end_recheck(self, recheck: Recheck) -> dict[int, float]:
        if self.end_error:
            raise self.end_error
        aborted = self.left.pop(recheck.request.sample_id, None) is not None
        self.rechecks.append("aborted" if aborted else "ended")
        return {0: 0.25}

    def stop(self) -> None:
        self.stopped.set()

    def wait_in_step(self) -> None:
        assert self.in_step.wait(LIMIT_S)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Loop(EngineLoop):
    """The loop of an engine over a fake core, and threads to call it from."""

    def __init__(self) -> None:
        self.core, self.clock, self.threads = FakeCore(), Clock(), ThreadPoolExecutor(3)
        super().__init__("engine-0", self.core, stall_timeout_s=5.0, clock=self.clock)

    def long_recheck(self) -> Future[Verdict | None]:
        """Let the engine be in the first engine step of a recheck that takes very long."""
        verdict = self.threads.submit(self.recheck, recheck_of(max_tokens=MANY**2))
        self.core.wait_in_step()
        return verdict

    def call_while_stepping(self, function: Callable[[], T]) -> T:
        """Call from another thread, and let engine steps go by until the call returns."""
        future = self.threads.submit(function)
        while not future.done():
            self.core.may_step.release()
            wait([future], timeout=0.01)
        return future.result()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    assert loop.start()["slots"] == 2
    yield loop
    loop.core.may_step.release(MANY)
    loop.shutdown()
    loop.threads.shutdown()


def collect(loop: EngineLoop, count: int) -> list[Sample]:
    samples: list[Sample] = []
    while len(samples) < count:
        taken = loop.take_finished(LIMIT_S)
        assert taken, "no sample ended"
        samples += taken
    return samples


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        threading.Event().wait(0.001)


# --- requests -----------------------------------------------------------------------------------


def test_every_request_ends_as_one_sample(loop: Loop) -> None:
    loop.core.may_step.release(100)
    loop.submit([request(str(index), max_tokens=1 + index % 3) for index in range(9)])
    samples = collect(loop, 9)
    assert sorted(s.sample_id for s in samples) == [str(index) for index in range(9)]
    assert loop.core.admitted == [str(index) for index in range(9)], "first come, first served"
    assert {(s.engine, s.token_ids, s.logprobs, s.finish_reason) for s in samples} == {
        ("engine-0", (7,), (-0.5,), "length")
    }
    assert loop.num_running == loop.num_queued == 0
    assert loop.take_finished(timeout_s=0) == []
    loop.core.reason = "error"
    loop.submit([request("broken")])
    assert [s.finish_reason for s in collect(loop, 1)] == ["error"]


def test_only_queued_requests_can_be_withdrawn(loop: Loop) -> None:
    loop.submit([request(name) for name in "abcd"])
    loop.core.wait_in_step()
    assert (loop.num_running, loop.num_queued) == (2, 2)
    assert loop.withdraw(["a", "c", "x"]) == ["c"]
    assert loop.withdraw(["c"]) == []
    loop.core.may_step.release(100)
    assert sorted(s.sample_id for s in collect(loop, 3)) == ["a", "b", "d"]
    assert "c" not in loop.core.admitted


def test_a_request_that_arrives_twice_runs_once(loop: Loop) -> None:
    loop.submit([request("a", 2)])
    loop.core.wait_in_step()
    loop.submit([request("b")])
    loop.submit([request("a", 2), request("b")])
    assert sorted(loop.held()) == ["a", "b"]
    loop.core.may_step.release(MANY)
    assert sorted(s.sample_id for s in collect(loop, 2)) == ["a", "b"]
    assert loop.core.admitted == ["a", "b"]
    assert loop.held() == []


# --- commands -----------------------------------------------------------------------------------


def test_commands_run_between_steps_and_their_errors_go_to_the_caller(loop: Loop) -> None:
    loop.submit([request("a", max_tokens=MANY)])
    loop.core.wait_in_step()
    assert not loop.call_while_stepping(lambda: loop.between_steps(loop.core.in_step.is_set))
    with pytest.raises(ZeroDivisionError):
        loop.call_while_stepping(lambda: loop.between_steps(lambda: 1 / 0))
    loop.core.may_step.release(MANY)
    assert len(collect(loop, 1)) == 1, "the loop goes on"


def test_no_policy_update_while_samples_are_unfinished(loop: Loop) -> None:
    """A command between rollouts is refused for running and for queued requests."""
    loop.submit([request("a", MANY), request("b", MANY), request("c")])
    loop.core.wait_in_step()
    update = partial(loop.between_rollouts, partial(setattr, loop, "policy_version", 3), "not now")
    with pytest.raises(EngineError, match="2 samples are running and 1 queued: not now"):
        loop.call_while_stepping(update)
    loop.core.may_step.release(2 * MANY)
    assert {s.policy_version for s in collect(loop, 3)} == {0}
    update()
    loop.submit([request("d")])
    assert [s.policy_version for s in collect(loop, 1)] == [3]


def test_a_tainted_engine_takes_not_one_step_more(loop: Loop) -> None:
    """A caller that hears of the fault finds the engine closed already."""
    steps = 0

    def taint() -> None:
        nonlocal steps
        steps = loop.core.num_steps
        raise WeightMismatch("not the learner's policy")

    def swap() -> None:
        with pytest.raises(WeightMismatch):
            loop.between_steps(taint)
        with pytest.raises(EngineError, match="has failed"):
            loop.submit([request("b")])

    loop.submit([request("a", max_tokens=MANY)])
    loop.core.wait_in_step()
    loop.call_while_stepping(swap)
    assert loop.core.stopped.wait(LIMIT_S)
    with pytest.raises(EngineError, match="not the learner's policy"):
        loop.take_finished(LIMIT_S)
    with pytest.raises(EngineError, match="has failed"):
        loop.between_steps(lambda: None)
    assert loop.core.num_steps == steps


def test_a_command_that_exits_fails_the_engine_and_all_commands(loop: Loop) -> None:
    with pytest.raises(SystemExit):
        loop.between_steps(lambda: exit(3))
    with pytest.raises(EngineError, match="SystemExit"):
        loop.between_steps(lambda: None)


def test_a_command_that_is_queued_at_the_shutdown_hears_of_it(loop: Loop) -> None:
    loop.submit([request("a", MANY)])
    loop.core.wait_in_step()
    queued = loop.threads.submit(loop.between_steps, lambda: None)
    until(lambda: loop.num_commands)
    ended = loop.threads.submit(loop.shutdown)
    until(lambda: loop.is_stopping)
    loop.core.may_step.release()
    with pytest.raises(EngineError, match="is shut down"):
        queued.result(LIMIT_S)
    ended.result(LIMIT_S)
    assert loop.core.stopped.is_set()
    with pytest.raises(EngineError, match="is shut down"):
        loop.submit([request("a")])


def test_a_command_hears_of_an_engine_that_fails_before_it_runs(loop: Loop) -> None:
    verdict = loop.long_recheck()
    queued = loop.threads.submit(loop.between_steps, lambda: None)
    until(lambda: loop.num_commands)
    loop.core.end_error = RuntimeError("lost in the end of a recheck")
    loop.core.may_step.release()
    with pytest.raises(EngineError, match="lost in the end"):
        queued.result(LIMIT_S)
    assert verdict.result(LIMIT_S) is None


# --- engines that hang or fail ------------------------------------------------------------------


def test_a_hung_step_is_noticed(loop: Loop) -> None:
    loop.submit([request("a")])
    loop.core.wait_in_step()
    assert loop.take_finished(timeout_s=0) == []
    loop.clock.now_s += 6.0
    with pytest.raises(EngineError, match="for 6 s"):
        loop.take_finished(timeout_s=0)
    loop.core.may_step.release(100)
    assert len(collect(loop, 1)) == 1


def test_a_hung_command_is_noticed_without_any_request(loop: Loop) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        may_end.wait(LIMIT_S)

    loop.threads.submit(loop.between_steps, hang)
    assert begun.wait(LIMIT_S)
    assert loop.take_finished(timeout_s=0) == []
    loop.clock.now_s += 6.0
    with pytest.raises(EngineError, match="for 6 s"):
        loop.take_finished(timeout_s=0)
    may_end.set()
    loop.between_steps(lambda: None)
    loop.clock.now_s += 6.0
    assert loop.take_finished(timeout_s=0) == [], "an engine with nothing to do is no fault"


def test_an_engine_that_cannot_start_says_why() -> None:
    loop = Loop()
    loop.core.start_error = ValueError("no such model")
    with pytest.raises(ValueError, match="no such model"):
        loop.start()
    with pytest.raises(EngineError, match="no such model"):
        loop.submit([request("a")])


# --- rechecks -----------------------------------------------------------------------------------


def test_an_idle_engine_generates_a_sample_again_and_delivers_nothing(loop: Loop) -> None:
    loop.core.may_step.release(100)
    assert loop.recheck(recheck_of(7)) == Verdict(None, 0.0)
    assert loop.recheck(recheck_of(8)) == Verdict(0, 0.25)
    assert loop.take_finished(timeout_s=0) == []
    assert loop.num_running == loop.num_queued == 0
    assert loop.core.rechecks == ["begun", "ended"] * 2
    loop.core.reason = "abort"
    assert loop.recheck(recheck_of(8)) is None


def test_a_request_ends_a_recheck_before_the_next_engine_step(loop: Loop) -> None:
    verdict = loop.long_recheck()
    loop.submit([request("a")])
    loop.core.may_step.release(2)
    assert verdict.result(LIMIT_S) is None
    assert [s.sample_id for s in collect(loop, 1)] == ["a"]
    assert (loop.core.num_steps, loop.core.rechecks) == (2, ["begun", "aborted"])


def test_a_policy_update_ends_a_recheck(loop: Loop) -> None:
    verdict = loop.long_recheck()
    update = partial(loop.core.rechecks.append, "updated")
    loop.call_while_stepping(lambda: loop.between_rollouts(update, "never refused"))
    assert verdict.result(LIMIT_S) is None
    assert loop.core.rechecks == ["begun", "aborted", "updated"]


def test_a_recheck_is_called_off_also_before_it_arrives(loop: Loop) -> None:
    verdict = loop.long_recheck()
    loop.end_recheck("again")
    loop.core.may_step.release()
    assert verdict.result(LIMIT_S) is None
    assert loop.core.num_steps == 1
    assert loop.recheck(recheck_of()) is None
    loop.end_recheck("another")
    loop.core.may_step.release()
    assert loop.recheck(recheck_of()) is not None


def test_no_recheck_beside_requests_or_under_another_policy(loop: Loop) -> None:
    assert loop.recheck(recheck_of(policy_version=3)) is None
    loop.submit([request("a", max_tokens=2)])
    loop.core.wait_in_step()
    assert loop.recheck(recheck_of()) is None
    loop.core.may_step.release(2)
    assert len(collect(loop, 1)) == 1
    assert loop.core.rechecks == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_or_ended_engine_leaves_nobody_waiting_for_a_recheck(
    loop: Loop, is_lost: bool
) -> None:
    verdict = loop.long_recheck()
    loop.core.error = RuntimeError("out of memory") if is_lost else None
    loop.core.may_step.release(MANY)
    if not is_lost:
        loop.shutdown()
    assert verdict.result(LIMIT_S) is None
    with pytest.raises(EngineError, match="out of memory" if is_lost else "shut down"):
        loop.recheck(recheck_of())


# --- the engine ---------------------------------------------------------------------------------


def test_a_strategy_that_the_engine_was_not_started_for_is_refused() -> None:
    engine = RolloutEngine(EngineConfig(model="m"))
    with pytest.raises(ConfigError, match=r"engine\.max_draft_tokens = 4"):
        engine.set_strategy({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4})
    with pytest.raises(ConfigError, match=r"engine\.drafter"):
        engine.update_drafter({"path": "/nowhere"}, 1)


def test_no_two_engines_draw_the_same_numbers() -> None:
    """vLLM's default seed is the same for all: groups spread over engines would repeat samples."""
    names = [f"engine-{index}" for index in range(64)]
    for seed in (None, 7):
        assert len({stream_seed(seed, name) for name in names}) == 64
    assert stream_seed(7, "engine-0") == stream_seed(7, "engine-0") < 2**32


def test_running_texts_are_noted_by_the_clock_until_they_end(loop: Loop) -> None:
    def step() -> None:
        steps = loop.core.num_steps
        loop.core.may_step.release()
        until(lambda: loop.core.num_steps > steps)
        loop.core.wait_in_step()

    text = Text((7,), (-0.5,), policy_version=0)
    loop.submit([request("long", max_tokens=MANY), request("short", max_tokens=4)])
    loop.core.wait_in_step()
    step()
    assert loop.take_texts() == [], "no second has passed"
    loop.clock.now_s += TEXTS_S
    step()
    assert loop.take_texts() == [("long", 0, text), ("short", 0, text)]
    loop.clock.now_s += TEXTS_S
    step()
    step()  # "short" ends, and comes again: what was noted does not begin the new one
    loop.submit([request("short", max_tokens=3)])
    step()
    loop.clock.now_s += TEXTS_S
    step()
    assert loop.take_texts() == [("long", 0, text), ("long", 0, text), ("short", 0, text)]


def test_a_text_of_another_policy_is_not_continued(loop: Loop) -> None:
    loop.policy_version = 4
    texts = [Text((7,), (-0.5,), policy_version=version) for version in (3, 4)]
    loop.submit(
        [replace(request(str(n), max_tokens=MANY), begun=text) for n, text in enumerate(texts)]
    )
    loop.core.wait_in_step()
    assert loop.core.begun == [None, texts[1]]
