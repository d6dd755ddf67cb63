"""The dispatcher with fake engines, which it cannot look into."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.contracts import SampleRequest, SamplingSpec, Text
from tlt.errors import EngineError
from tlt.rollout.dispatch import Assign, Dispatcher, Recall


def request(index: int, max_tokens: int = 10) -> SampleRequest:
    return SampleRequest(str(index), (1, 2, 3), SamplingSpec(max_tokens=max_tokens))


class FakeEngine:
    """Runs `slots` requests at once; the rest wait and can be withdrawn."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.waiting: list[SampleRequest] = []
        self.running: dict[str, int] = {}

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.pop(0)
            self.running[request.sample_id] = request.sampling.max_tokens

    def step(self) -> list[str]:
        """Return the responses that end."""
        self.admit()
        self.running = {sample_id: left - 1 for sample_id, left in self.running.items()}
        ended = [sample_id for sample_id, left in self.running.items() if left <= 0]
        for sample_id in ended:
            del self.running[sample_id]
        self.admit()
        return ended


class World:
    """Carries out actions at once, and keeps count of deliveries."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.engines: dict[str, FakeEngine] = {}
        self.delivered: list[str] = []
        self.started: list[str] = []

    def add(self, name: str, slots: int) -> None:
        self.engines[name] = FakeEngine(slots)
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


def test_first_come_first_served_by_the_least_loaded_engine() -> None:
    world = World(Dispatcher(prefetch=0))
    world.add("a", 8)
    world.dispatcher.submit(request(i) for i in range(3))
    world.settle()
    world.add("b", 8)
    world.dispatcher.submit(request(i) for i in range(3, 11))
    world.settle()
    assert [world.dispatcher.outstanding(name) for name in "ab"] == [6, 5]
    assert world.started[:3] == ["0", "1", "2"]


def test_a_lost_engine_gives_everything_back_once() -> None:
    dispatcher = Dispatcher(prefetch=2)
    dispatcher.engine_ready("a", 4)
    dispatcher.submit([request(i) for i in range(6)])
    dispatcher.actions()
    assert dispatcher.finished("a", ["0"]) == ["0"]
    assert sorted(dispatcher.engine_lost("a")) == ["1", "2", "3", "4", "5"]
    assert dispatcher.engine_lost("a") == {}
    assert dispatcher.finished("a", ["1"]) == []  # a late message of the lost engine
    dispatcher.engine_ready("b", 8)
    (assign,) = dispatcher.actions()
    assert isinstance(assign, Assign)
    assert [r.sample_id for r in assign.requests] == ["1", "2", "3", "4", "5"]
    assert dispatcher.finished("b", ["1", "9"]) == ["1"]
    assert dispatcher.finished("b", ["1"]) == []


def test_the_text_of_a_lost_engine_is_continued() -> None:
    dispatcher = Dispatcher(prefetch=0, max_attempts=9)
    dispatcher.submit([request(1), request(2)])
    dispatcher.engine_ready("a", 2)
    dispatcher.actions()

    def text(*token_ids: int) -> Text:
        return Text(token_ids, (-0.5,) * len(token_ids), policy_version=3)

    dispatcher.gained("a", [("1", 0, text(5, 6)), ("2", 0, text(9))])
    dispatcher.gained("a", [("1", 2, text(7)), ("1", 4, text(8))])  # one answer was lost
    dispatcher.gained("b", [("1", 3, text(8))])  # not its owner
    # The last known token may be the end of the response, so it is drawn again.
    assert dispatcher.engine_lost("a", keep_texts=True) == {"1": 2, "2": 0}
    dispatcher.engine_ready("b", 2)
    assert [r.begun for r in sent(dispatcher)] == [text(5, 6), None]
    dispatcher.gained("b", [("1", 2, text(7, 8, 9))])
    assert dispatcher.engine_lost("b", keep_texts=True) == {"1": 4, "2": 0}
    dispatcher.engine_ready("c", 2)
    assert [r.begun for r in sent(dispatcher)] == [text(5, 6, 7, 8), None]
    dispatcher.gained("c", [("1", 0, text(5))])  # the engine has started again
    assert dispatcher.failed("c", ["1"]) == ["1"]
    assert [r.begun for r in sent(dispatcher)] == [None]
    dispatcher.gained("c", [("1", 0, text(5, 6))])
    assert dispatcher.engine_lost("c") == {"1": 0, "2": 0}  # its policy is in doubt
    dispatcher.engine_ready("d", 2)
    assert [r.begun for r in sent(dispatcher)] == [None, None]
    dispatcher.gained("d", [("1", 0, text(5, 6))])
    assert dispatcher.engine_lost("d", keep_texts=True) == {"1": 0, "2": 0}, "its text may kill"


def sent(dispatcher: Dispatcher) -> list[SampleRequest]:
    return [r for of in dispatcher.actions() if isinstance(of, Assign) for r in of.requests]


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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 5))
def test_exactly_once_whatever_happens(seed: int, num_engines: int, prefetch: int) -> None:
    rng = random.Random(seed)
    world = World(Dispatcher(prefetch, max_attempts=1000))
    for index in range(num_engines):
        world.add(f"e{index}", rng.randint(1, 5))
    submitted = 0
    incarnation = 0
    for _ in range(60):
        event = rng.random()
        if event < 0.3:
            sizes = [rng.randint(1, 12) for _ in range(rng.randint(1, 9))]
            batch = [request(submitted + i, size) for i, size in enumerate(sizes)]
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
