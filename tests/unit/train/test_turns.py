"""Samples of several turns in an RL step: generation, rewards, records and the mean's divisor."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from light_tasks import Counter, LightHost, ToolChat
from small_run import small_run

pytest.importorskip("ray")

from tlt.contracts import Sample, SampleRequest, Scored
from tlt.errors import EngineError
from tlt.harvest.contract import NoHarvest
from tlt.harvest.forecast import TailForecast
from tlt.observe.live import Live
from tlt.observe.metrics import METRICS
from tlt.observe.stopwatch import Stopwatch
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import HeldOut
from tlt.tasks.rewards import Reward, exact_score
from tlt.train.records import turns_record
from tlt.train.rollouts import Rollouts

PROBLEMS = [Problem(f"p{number}", f"{number}", f"{number}") for number in range(4)]


class Pool:
    """Says what `Counter` wants: so many calls as the problem's number, then the answer."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.requests: dict[str, SampleRequest] = {}
        self.away: set[str] = set()
        self.num_answered = 0
        self.idle: Any = self

    async def generate(
        self, requests: Sequence[SampleRequest], are_turns: bool
    ) -> AsyncIterator[Sample]:
        assert are_turns
        self.requests |= {r.sample_id: r for r in requests}
        for request in self.rng.sample(requests, len(requests)):
            await asyncio.sleep(0)
            tokens = Counter.turn(request)
            self.away.add(request.sample_id)
            yield Sample(
                *(request.sample_id, tokens, (-0.5,) * len(tokens), "stop", "engine-0", 4),
                *(0.0, 0.0, 0.0),
            )

    def turn_answered(self, turn: Sample, follows: bool) -> None:
        self.away.remove(turn.sample_id)
        self.num_answered += 1

    def loads(self) -> dict[str, int | None]:
        return {}


class Rewards:
    def __init__(self) -> None:
        self.texts: list[str] = []

    async def score(self, problem: Problem, text: str, function: Any = None) -> Reward:
        self.texts.append(text)
        return Reward(float(text == problem.answer))

    def checked(self, problem: Problem, value: float | None, what: str) -> Reward:
        assert value is not None
        return Reward(value)


def rollouts(
    tmp_path: Path, seed: int = 0, **sections: Any
) -> tuple[Rollouts, Pool, Rewards, LightHost]:
    settings: dict[str, Any] = {
        "task": {"name": "gcd", "environment": "light_tasks:Counter"},
        "sampling": {"max_tokens": 900},
        "tools": {"max_turns": 9},
    }
    config = small_run(**settings | sections)
    pool, rewards, host = Pool(seed), Rewards(), LightHost(tmp_path)
    given: Any = pool
    live = Live(Path("live.json"), 1, given, NoHarvest(), TailForecast(), lambda *_: None)
    made: Any = (config, ToolChat(), given, rewards, NoHarvest(), live, 900, host)
    return Rollouts(*made), pool, rewards, host


def generate(tmp_path: Path, seed: int = 0, **sections: Any) -> tuple[list[Scored], Rewards, Pool]:
    made, pool, rewards, _ = rollouts(tmp_path, seed, **sections)
    scored = asyncio.run(made.generate(2, PROBLEMS, 4, Stopwatch(), lambda _: False))
    return scored, rewards, pool


def test_every_sample_has_its_turns_and_the_order_does_not_matter(tmp_path: Path) -> None:
    scored, rewards, pool = generate(tmp_path / "0")
    assert [(s.problem_number, s.place) for s in scored] == [
        (number, place) for number in range(4) for place in range(2)
    ]
    assert [s.turns.num_turns for s in scored] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [len(s.turns.observed) for s in scored] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.reward for s in scored] == [1.0] * 8
    assert sorted(rewards.texts) == sorted(str(n) for n in range(4) for _ in range(2)), "last turns"
    assert not pool.away, "the pool hears of every answer"
    assert pool.num_answered == sum(s.turns.num_turns for s in scored)
    seeds = {r.sampling.seed for r in pool.requests.values()}
    assert len(seeds) == len(pool.requests), "no two turns share their noise"
    for seed in range(1, 5):
        again, _, _ = generate(tmp_path / f"{seed}", seed)
        assert again == scored


def test_the_environments_reward_counts_with_auto(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"task": {"name": "gcd", "environment": "light_tasks:Paid"}}
    scored, rewards, _ = generate(tmp_path / "auto", **sections)
    assert [s.reward for s in scored] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert rewards.texts == []
    scored, rewards, _ = generate(tmp_path / "own", reward={"function": "exact"}, **sections)
    assert [s.reward for s in scored] == [1.0] * 8
    assert len(rewards.texts) == 8


def test_an_evaluation_has_turns_as_well(tmp_path: Path) -> None:
    made, pool, _, _ = rollouts(tmp_path)
    own = HeldOut("", "", PROBLEMS, exact_score, 1, 0.0)
    scored = asyncio.run(made.evaluate(2, own, 4, Stopwatch()))
    assert [s.turns.num_turns for s in scored] == [1, 2, 3, 4]
    assert "eval-2/00003/0000+3" in pool.requests


def test_problems_that_the_environment_does_not_take_are_left_out(tmp_path: Path) -> None:
    made, _, _, host = rollouts(tmp_path)
    host.refused = {"p1", "p3"}
    scored = asyncio.run(made.generate(2, PROBLEMS, 4, Stopwatch(), lambda _: False))
    assert [s.problem_number for s in scored] == [0, 0, 2, 2]
    host.refused |= {"p0", "p2"}
    with pytest.raises(EngineError, match="took none of 4 problems"):
        asyncio.run(made.generate(3, PROBLEMS, 4, Stopwatch(), lambda _: False))


def test_an_error_in_a_turn_ends_the_run(tmp_path: Path) -> None:
    made, pool, _, host = rollouts(tmp_path)
    host.broken = True
    with pytest.raises(ZeroDivisionError):
        asyncio.run(made.generate(2, PROBLEMS, 4, Stopwatch(), lambda _: False))
    assert not pool.away


def test_a_record_says_what_the_environment_did(tmp_path: Path) -> None:
    scored, _, _ = generate(tmp_path)
    found = turns_record(scored)
    assert found.keys() == {name for name in METRICS if name.startswith("tools/")}
    assert (found["tools/turns_mean"], found["tools/turns_max"]) == (2.5, 4)
    assert found["tools/errors"] == 0
    assert found["tools/wait_s_mean"] == 0.25 * 2.5
    drawn = sum(s.num_drawn for s in scored)
    whole = sum(len(s.sample.token_ids) for s in scored)
    assert found["tools/answer_tokens"] == whole - drawn > 0
