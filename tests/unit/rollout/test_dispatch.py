"""The dispatcher with fake engines, which it cannot look into."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import EngineError
from tlt.rollout.dispatch import Assign, Dispatcher, Recall
from tlt.rollout.lengths import LengthForecast, prompt_key


def request(index: int, max_tokens: int = 10, prompt: int = 1) -> SampleRequest:
    return SampleRequest(str(index), (prompt, 2, 3), SamplingSpec(max_tokens=max_tokens))


def forecast(order: str) -> LengthForecast | None:
    return LengthForecast() if order == "longest_first" else None


def dispatcher_of(order: str, prefetch: int) -> Dispatcher:
    return Dispatcher(prefetch, forecast(order), together=order == "siblings")


every_order = pytest.mark.parametrize("order", ["longest_first", "arrival", "siblings"])


class FakeEngine:
    """Runs `slots` requests at once; the rest wait and can be withdrawn."""

    def __init__(self, slots: int, lengths: Mapping[str, int]) -> None:
        self.slots = slots
        self.waiting: list[SampleRequest] = []
        self.running: dict[str, int] = {}
        self.lengths = lengths
        """True lengths of responses that end before their limit."""

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.pop(0)
            limit = request.sampling.max_tokens
            self.running[request.sample_id] = self.lengths.get(request.sample_id, limit)

    def step(self) -> dict[str, int]:
        """Return the responses that end, and their lengths."""
        self.admit()
        ended = {}
        for sample_id in list(self.running):
            self.running[sample_id] -= 1
            if self.running[sample_id] <= 0:
                del self.running[sample_id]
                ended[sample_id] = self.lengths.get(sample_id, 1)
        self.admit()
        return ended


class World:
    """Carries out actions at once, and keeps count of deliveries."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.engines: dict[str, FakeEngine] = {}
        self.lengths: dict[str, int] = {}
        """True lengths of responses; others have all the tokens that they may have."""
        self.delivered: list[str] = []
        self.started: list[str] = []

    def add(self, name: str, slots: int) -> None:
        self.engines[name] = FakeEngine(slots, self.lengths)
        self.dispatcher.engine_ready(name, slots)

    def settle(self) -> None:
        while actions := self.dispatcher.actions():
            for action in actions:
                engine = self.engines[action.engine]
                if isinstance(action, Assign):
                    self.started += [r.sample_id for r in action.requests]
                    engine.waiting.extend(action.requests)
                    engine.admit()
                else:
                    assert isinstance(action, Recall)
                    wanted = set(action.sample_ids)
                    taken = [r.sample_id for r in engine.waiting if r.sample_id in wanted]
                    engine.waiting = [r for r in engine.waiting if r.sample_id not in wanted]
                    self.dispatcher.recalled(action.engine, taken)

    def step(self) -> None:
        for name, engine in self.engines.items():
            self.delivered += self.dispatcher.finished(name, engine.step())
        self.settle()

    def idle_beside_queued(self) -> bool:
        free = any(len(e.running) < e.slots for e in self.engines.values())
        queued = any(e.waiting for e in self.engines.values()) or self.dispatcher.num_queued
        return bool(free and queued)

    def finish(self) -> int:
        """Step until all is done; return the number of steps."""
        steps = 0
        self.settle()
        while self.dispatcher.num_unfinished:
            self.step()
            steps += 1
        return steps


def test_least_outstanding_work_first() -> None:
    world = World(Dispatcher(prefetch=0))
    world.add("a", 8)
    world.add("b", 8)
    world.dispatcher.submit([request(0, 100), *(request(i, 10) for i in range(1, 9))])
    world.settle()
    assert world.dispatcher.outstanding("a") == 1
    assert world.dispatcher.outstanding("b") == 8


@every_order
def learned(**lengths: int) -> LengthForecast:
    """Return a forecast that knows these prompts, `p1` and so on, from an earlier epoch."""
    found = LengthForecast()
    for name, tokens in lengths.items():
        found.ended(prompt_key(request(0, prompt=int(name[1:]))), tokens)
    found.rollout_ended()
    return found


def test_long_prompts_of_the_last_epoch_go_first() -> None:
    world = World(Dispatcher(0, learned(p1=5, p2=50, p3=20)))
    world.dispatcher.submit(request(i, 100, prompt=1 + i % 3) for i in range(6))
    world.add("a", 1)
    world.finish()
    assert world.started == ["1", "4", "2", "5", "0", "3"]


def test_unknown_prompts_are_probed_first_then_count_as_long() -> None:
    world = World(Dispatcher(0, learned(p1=50)))
    world.dispatcher.submit(request(i, 100, prompt=1 + i // 3) for i in range(9))
    world.lengths |= {"3": 5, "6": 70}
    world.add("a", 4)
    world.settle()
    # A probe of each unknown prompt, and then the prompts that may be longest.
    assert world.started == ["3", "6", "4", "5"]
    for _ in range(5):
        world.step()
    # The probe of prompt 2 has ended: it is short after all, and prompt 3 may still be long.
    assert world.started[4:] == ["7"]
    world.finish()
    assert world.started[5:] == ["8", "0", "1", "2"]


def test_a_prompt_whose_sample_outgrows_its_forecast_goes_first() -> None:
    """No sibling has ended: what ends beside it shows how long the sample is by now."""
    world = World(Dispatcher(0, learned(p1=3, p2=5, p3=4)))
    world.dispatcher.submit([request(0, 100, prompt=1)])
    world.add("a", 2)
    world.settle()
    world.dispatcher.submit([request(1, 100, prompt=4), *(request(i, 9, prompt=i) for i in (2, 3))])
    world.dispatcher.submit([request(5, 100, prompt=1)])
    world.lengths |= {"0": 60, "1": 6, "2": 5, "3": 4, "5": 60}
    world.finish()
    assert world.started == ["0", "1", "5", "2", "3"]


def test_long_samples_run_beside_few_others() -> None:
    world = World(Dispatcher(0, learned(p1=400, p2=20)))
    for name in "ab":
        world.add(name, 64)
    world.dispatcher.submit([request(0, 999, prompt=2), request(1, 999, prompt=1)])
    world.dispatcher.submit(request(i, 999, prompt=2) for i in range(2, 40))
    world.settle()
    assert min(len(engine.running) for engine in world.engines.values()) == 1


def test_forced_lengths_need_no_forecast() -> None:
    world = World(Dispatcher(0, LengthForecast()))
    lengths = [5, 30, 10]
    specs = [SamplingSpec(max_tokens=n, ignore_eos=True) for n in lengths]
    world.dispatcher.submit(
        SampleRequest(str(n), (1,), s) for n, s in zip(lengths, specs, strict=True)
    )
    world.add("a", 1)
    world.finish()
    assert world.started == ["30", "10", "5"]


def rollout(order: str, known: Mapping[str, int], seed: int) -> int:
    """Return the engine steps of a rollout: 4 engines with 4 slots, 12 prompts of 8 samples."""
    rng = random.Random(seed)
    forecast = LengthForecast() if order == "longest_first" else None
    if forecast is not None:
        forecast.restore(known)
    world = World(Dispatcher(0, forecast))
    for name in "abcd":
        world.add(name, 4)
    world.dispatcher.submit(request(i, 500, prompt=i // 8) for i in range(96))
    world.lengths |= {str(i): length_of(rng, i // 8) for i in range(96)}
    return world.finish()


def length_of(rng: random.Random, prompt: int) -> int:
    return min(500, 1 + int(4 * 1.5**prompt * rng.lognormvariate(0, 0.3)))


def test_the_longest_first_is_faster_and_wrong_forecasts_cost_little() -> None:
    keys = [prompt_key(request(0, prompt=prompt)) for prompt in range(12)]
    right = {key: int(4 * 1.5**prompt) for prompt, key in enumerate(keys)}
    wrong = dict(zip(keys, reversed(right.values()), strict=True))
    steps = {
        name: sum(rollout(order, known, seed) for seed in range(5))
        for name, order, known in (
            *(("arrival", "arrival", {}), ("nothing", "longest_first", {})),
            *(("right", "longest_first", right), ("wrong", "longest_first", wrong)),
        )
    }
    assert steps["right"] < 0.85 * steps["arrival"]
    assert steps["nothing"] < steps["arrival"]
    assert steps["wrong"] < 1.1 * steps["arrival"]


def owners(dispatcher: Dispatcher) -> dict[str, set[str]]:
    """Return the engines of each prompt, of the requests that are assigned now."""
    found: dict[str, set[str]] = {}
    for action in dispatcher.actions():
        assert isinstance(action, Assign)
        for sent in action.requests:
            found.setdefault(prompt_key(sent), set()).add(action.engine)
    return found


@every_order
def test_siblings_stay_together_while_many_requests_wait(order: str) -> None:
    dispatcher = dispatcher_of(order, 0)
    for name in "abcd":
        dispatcher.engine_ready(name, 8)
    dispatcher.submit(request(i, prompt=i // 16) for i in range(128))
    for num_queued in (96, 64, 32):
        spread = {len(engines) for engines in owners(dispatcher).values()}
        assert dispatcher.num_queued == num_queued
        assert [dispatcher.outstanding(name) for name in "abcd"] == [8] * 4
        assert (spread == {1}) == (order == "siblings" and num_queued >= 64)
        for name in "abcd":
            dispatcher.finished(name, dict.fromkeys(dispatcher.held_by(name), 5))


@every_order
def test_waiting_requests_move_to_an_idle_engine(order: str) -> None:
    world = World(dispatcher_of(order, 4))
    world.add("a", 2)
    world.dispatcher.submit([request(i) for i in range(6)])
    world.settle()
    assert len(world.engines["a"].waiting) == 4
    world.add("b", 8)
    world.settle()
    assert world.engines["a"].waiting == []
    assert len(world.engines["b"].running) == 4


@every_order
def test_one_idle_engine_is_not_enough(order: str) -> None:
    world = World(dispatcher_of(order, 4))
    world.add("a", 1)
    world.dispatcher.submit([request(i) for i in range(5)])
    world.settle()
    for name in "bcd":
        world.add(name, 1)
    world.settle()
    assert all(len(e.running) == 1 for e in world.engines.values())
    assert not world.idle_beside_queued()


@every_order
def test_a_lost_engine_gives_everything_back_once(order: str) -> None:
    dispatcher = dispatcher_of(order, 2)
    dispatcher.engine_ready("a", 4)
    dispatcher.submit([request(i) for i in range(6)])
    dispatcher.actions()
    assert dispatcher.finished("a", {"0": 5}) == ["0"]
    assert sorted(dispatcher.engine_lost("a")) == ["1", "2", "3", "4", "5"]
    assert dispatcher.engine_lost("a") == []
    assert dispatcher.finished("a", {"1": 5}) == []  # a late message of the lost engine
    dispatcher.engine_ready("b", 8)
    (assign,) = dispatcher.actions()
    assert isinstance(assign, Assign)
    assert [r.sample_id for r in assign.requests] == ["1", "2", "3", "4", "5"]
    assert dispatcher.finished("b", {"1": 5, "9": 5}) == ["1"]
    assert dispatcher.finished("b", {"1": 5}) == []


def test_a_sample_that_kills_engines_is_named() -> None:
    dispatcher = Dispatcher(prefetch=0, max_attempts=2)
    dispatcher.submit([request(7)])
    dispatcher.engine_ready("a", 1)
    dispatcher.actions()
    dispatcher.engine_lost("a")
    dispatcher.engine_ready("b", 1)
    dispatcher.actions()
    with pytest.raises(EngineError, match="sample '7' was on 2 engines"):
        dispatcher.engine_lost("b")


def test_the_same_id_twice_is_refused() -> None:
    dispatcher = Dispatcher(prefetch=0)
    dispatcher.submit([request(1)])
    with pytest.raises(ValueError, match="already being generated"):
        dispatcher.submit([request(1)])


@every_order
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 5))
def test_exactly_once_whatever_happens(
    order: str, seed: int, num_engines: int, prefetch: int
) -> None:
    """Forecasts are as wrong as can be: lengths are random, and engines may tell others."""
    rng = random.Random(seed)
    known = forecast(order)
    if known is not None:
        for prompt in range(3):
            known.ended(prompt_key(request(0, prompt=prompt)), rng.randint(0, 50))
    world = World(Dispatcher(prefetch, known, 1000, together=order == "siblings"))
    for index in range(num_engines):
        world.add(f"e{index}", rng.randint(1, 5))
    submitted = 0
    incarnation = 0
    for _ in range(60):
        event = rng.random()
        if event < 0.3:
            batch = [
                request(submitted + i, rng.randint(1, 12), rng.randint(0, 5))
                for i in range(rng.randint(1, 9))
            ]
            world.lengths |= {
                r.sample_id: rng.randint(1, r.sampling.max_tokens + 5)
                for r in batch
                if rng.random() < 0.5
            }
            submitted += len(batch)
            world.dispatcher.submit(batch)
        elif event < 0.4 and len(world.engines) > 1:
            name = rng.choice(sorted(world.engines))
            del world.engines[name]
            world.dispatcher.engine_lost(name)
        elif event < 0.5:
            incarnation += 1
            world.add(f"n{incarnation}", rng.randint(1, 5))
        world.settle()
        assert not world.idle_beside_queued()
        world.step()
    while world.dispatcher.num_unfinished:
        world.step()
        assert not world.idle_beside_queued()
    assert sorted(map(int, world.delivered)) == list(range(submitted))


@every_order
def test_ten_thousand_samples_over_64_engines(order: str) -> None:
    rng = random.Random(0)
    world = World(dispatcher_of(order, 4))
    for index in range(64):
        world.add(f"e{index}", 64)
    batch = [request(i, 400, prompt=i // 16) for i in range(10_000)]
    world.lengths |= {str(i): min(400, int(rng.lognormvariate(3, 1)) + 1) for i in range(10_000)}
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent
            started = time.thread_time()
            result = function(*args)
            spent += time.thread_time() - started
            return result

        return call

    for name in ("submit", "actions", "finished", "recalled"):
        setattr(world.dispatcher, name, timed(getattr(world.dispatcher, name)))
    world.dispatcher.submit(batch)
    world.settle()
    while world.dispatcher.num_unfinished:
        assert not world.idle_beside_queued()
        world.step()
    assert len(world.delivered) == len(set(world.delivered)) == 10_000
    per_sample_ms = 1000 * spent / 10_000
    assert per_sample_ms < 1.0, f"{per_sample_ms:.3f} ms a sample"
