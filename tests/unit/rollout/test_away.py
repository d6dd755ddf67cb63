"""Trajectories that wait for tools: who is idle for how long, and who gets the next turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fake_engines import Engines, request, started

from tlt.contracts import Sample, SampleRequest
from tlt.rollout.away import Away
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Rechecks
from tlt.spans import Span


class Times:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.away = Away(lambda: self.now_s, lambda: self.now_s + 1000)

    def call(self, engine: str, turn: str, seconds: float, by_tool: bool = True) -> None:
        self.away.left(engine, turn)
        self.now_s += seconds
        self.away.back(turn, by_tool)


def test_the_last_calls_say_when_a_trajectory_comes_back() -> None:
    times = Times()
    assert times.away.returns_s("a") == math.inf, "none is away"
    times.away.left("a", "1")
    assert times.away.returns_s("a") == 0.0, "nothing is known of a first call"
    times.now_s += 4
    times.away.back("1", by_tool=True)
    times.call("a", "2", 1.0)
    times.call("a", "3", 2.0)
    times.call("a", "4", 0.0, by_tool=False)  # no tool was called: it says nothing of tools
    times.away.left("a", "5")
    times.now_s += 0.5
    times.away.left("a", "6")
    assert times.away.returns_s("a") == 1.5, "the oldest, by the median"
    assert times.away.returns_s("b") == math.inf
    times.now_s += 60
    assert times.away.returns_s("a") == 0.0, "it is late, and may come at any moment"
    assert len(times.away) == 2


def test_waits_are_spans_that_do_not_overlap() -> None:
    times = Times()
    times.away.left("a", "1")
    times.now_s += 1
    times.away.left("a", "2")
    times.away.left("b", "3")
    times.now_s += 1
    times.away.back("1", by_tool=True)
    times.away.back("2", by_tool=True)
    times.away.back("3", by_tool=False)
    times.now_s += 5
    times.call("a", "4", 2.0)
    spans = times.away.take_spans()
    assert spans == {"a": [Span("tools", 1100, 1102), Span("tools", 1107, 1109)]}
    assert times.away.take_spans() == {}


# --- the dispatcher -------------------------------------------------------------------------------


def prefers(index: int, engine: str | None) -> SampleRequest:
    return replace(request(index), prefers=engine)


def owners(dispatcher: Dispatcher) -> dict[str, str]:
    found: dict[str, str] = {}
    for action in dispatcher.actions():
        assert isinstance(action, Assign)
        found |= {r.sample_id: action.engine for r in action.requests}
    return found


def test_a_turn_goes_where_its_prompt_is_cached_if_a_slot_is_free() -> None:
    dispatcher = Dispatcher(prefetch=1)
    dispatcher.engine_ready("a", 2)
    dispatcher.engine_ready("b", 4)
    dispatcher.submit([prefers(0, "a"), prefers(1, "a"), prefers(2, "a"), prefers(3, "gone")])
    found = owners(dispatcher)
    assert (found["0"], found["1"]) == ("a", "a"), "though b has less to do"
    assert (found["2"], found["3"]) == ("b", "b"), "no slot is free, or no engine is there"
    dispatcher.finished("a", ["0"])
    dispatcher.submit([prefers(4, "b"), prefers(5, "a"), prefers(6, None)])
    found = owners(dispatcher)
    assert (found["4"], found["5"]) == ("b", "a")
    assert found["6"] == "b"


def test_a_lost_engines_turn_goes_to_another() -> None:
    dispatcher = Dispatcher(prefetch=0)
    dispatcher.engine_ready("a", 2)
    dispatcher.engine_ready("b", 2)
    dispatcher.submit([prefers(0, "a")])
    assert owners(dispatcher) == {"0": "a"}
    dispatcher.engine_lost("a")
    assert owners(dispatcher) == {"0": "b"}


# --- the pool -------------------------------------------------------------------------------------


class Harvest:
    """Hears which engines are idle, and for how long."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []

    def ready(self, engine: str, report: Any) -> None: ...

    def idle(self, engine: str, for_s: float = math.inf) -> None:
        self.heard.append((engine, for_s))

    async def needed(self, engine: str) -> None: ...


async def turns(pool: RolloutPool, requests: list[SampleRequest]) -> AsyncIterator[Sample]:
    async for sample in pool.generate(requests, are_turns=True):
        yield sample


async def test_an_engine_is_idle_until_its_trajectory_comes_back() -> None:
    harvest = Harvest()
    async with started(Engines(), 2) as pool:
        pool.idle.listener = harvest
        ended = [s async for s in turns(pool, [request(0), request(1)])]
        waiting = {s.engine for s in ended}
        assert harvest.heard, "nobody generates, but the rollout goes on"
        assert {for_s for name, for_s in harvest.heard if name in waiting} == {0.0}
        await asyncio.sleep(0.2)
        pool.idle.turn_answered(ended[0], follows=True)
        again = replace(request(0), sample_id="0+1", prefers=ended[0].engine)
        (second,) = [s async for s in turns(pool, [again])]
        assert second.engine == ended[0].engine
        assert pool.idle.take_tool_spans().keys() == {ended[0].engine}
        del harvest.heard[:]
        pool.idle.turn_answered(second, follows=False)
        assert [name for name, _ in harvest.heard] == [second.engine], "one is still away"
        assert harvest.heard[0][1] in (0.0, math.inf)
        del harvest.heard[:]
        pool.idle.turn_answered(ended[1], follows=False)
        assert harvest.heard == [], "the rollout is over"


async def test_the_seconds_follow_from_calls_before() -> None:
    harvest = Harvest()
    async with started(Engines(), 1) as pool:
        pool.idle.listener = harvest
        (first,) = [s async for s in turns(pool, [request(0)])]
        await asyncio.sleep(0.3)
        pool.idle.turn_answered(first, follows=True)
        del harvest.heard[:]
        (second,) = [s async for s in turns(pool, [request(1)])]
        await asyncio.sleep(0)
        ((_, for_s),) = [heard for heard in harvest.heard if heard[1] != 0.0]
        assert 0.2 < for_s < 0.6
        pool.idle.turn_answered(second, follows=False)


async def test_rechecks_end_only_when_all_trajectories_have_ended() -> None:
    made = Engines(long_rechecks=True)
    async with started(made, 2) as pool:
        pool.idle.rechecks = Rechecks(1.0, 10, "float32")
        ended = [s async for s in turns(pool, [request(0), request(1)])]
        await asyncio.sleep(0.02)
        assert made.commands("recheck")
        assert not made.commands("end_recheck")
        pool.idle.turn_answered(ended[0], follows=False)
        await asyncio.sleep(0.02)
        assert not made.commands("end_recheck")
        pool.idle.turn_answered(ended[1], follows=False)
        await asyncio.sleep(0.02)
        assert made.commands("end_recheck")


@pytest.mark.parametrize("are_turns", [False, True])
async def test_only_turns_are_waited_for(are_turns: bool) -> None:
    async with started(Engines(), 1) as pool:
        pool.idle.listener = harvest = Harvest()
        async for _ in pool.generate([request(0)], are_turns):
            pass
        await asyncio.sleep(0.02)
        assert bool(harvest.heard) == are_turns
