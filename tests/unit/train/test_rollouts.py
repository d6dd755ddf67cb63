"""From problems to scored samples, with a pool, rewards and a chat that are fakes."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

pytest.importorskip("ray")

from tlt.config.train import TrainConfig
from tlt.contracts import Sample, SampleRequest, Scored
from tlt.errors import ConfigError, EngineError
from tlt.harvest.contract import NoHarvest
from tlt.harvest.forecast import TailForecast
from tlt.observe.live import Live
from tlt.observe.stopwatch import Stopwatch
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import HeldOut
from tlt.tasks.rewards import Reward
from tlt.train.rollouts import Rollouts, make_requests

PROBLEMS = [Problem(f"p{number}", str(number), "") for number in range(12)]


def config(forced_lengths: Any = None) -> TrainConfig:
    return small_run(
        run={"seed": 3},
        sampling={"prompts_per_step": 12, "group_size": 11, "max_tokens": 64},
        debug={"forced_lengths": forced_lengths},
    )


class FakeChat:
    long: frozenset[str] = frozenset()
    """Questions with a prompt of three tokens."""

    def prompt(self, question: str, history: object = ()) -> tuple[int, ...]:
        return (int(question),) * (3 if question in self.long else 1)

    def text(self, token_ids: Sequence[int]) -> str:
        return f"{len(token_ids)}"


class FakeRewards:
    async def score(self, problem: Problem, text: str, function: Any = None) -> Reward:
        if function is not None:
            return Reward(function(problem, text))
        return Reward(float(text), "timeout" if problem.problem_id == "p5" else None)


class FakePool:
    """Samples end in any order; each has as many tokens as its request's seed says, modulo 7."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []

    async def generate(
        self, requests: Sequence[SampleRequest], are_turns: bool = False
    ) -> AsyncIterator[Sample]:
        self.requests = list(requests)
        for request in random.Random(0).sample(requests, len(requests)):
            await asyncio.sleep(0)
            tokens = (1,) * ((request.sampling.seed or 0) % 7)
            yield Sample(request.sample_id, tokens, (), "stop", "engine-0", 4, 0.0, 0.0, 0.0)

    def loads(self) -> dict[str, int | None]:
        return {}


def made_rollouts(
    pool: FakePool, max_prompt_tokens: int = 1, forced_lengths: Any = None
) -> tuple[Rollouts, list[tuple[str, float, float]]]:
    chat: Any = FakeChat()
    rewards: Any = FakeRewards()
    given: Any = pool
    harvest = NoHarvest()
    shown: list[tuple[str, float, float]] = []
    live = Live(Path("live.json"), 1, given, harvest, TailForecast(), lambda *s: shown.append(s))
    made = config(forced_lengths)
    return Rollouts(made, chat, given, rewards, harvest, live, max_prompt_tokens), shown


def generate(
    policy_version: int = 4, max_prompt_tokens: int = 1, forced_lengths: Any = None
) -> tuple[list[Scored], list[Scored], FakePool]:
    pool = FakePool()
    rollouts, shown = made_rollouts(pool, max_prompt_tokens, forced_lengths)
    ended: list[Scored] = []

    def on_scored(each: Scored) -> bool:
        ended.append(each)
        return False

    scored = asyncio.run(rollouts.generate(2, PROBLEMS, policy_version, Stopwatch(), on_scored))
    total = len(scored)
    assert shown == [("step 2: generating", done, total) for done in range(total + 1)]
    return scored, ended, pool


def test_samples_come_back_in_the_order_of_problems_and_places() -> None:
    scored, ended, pool = generate()
    assert [(s.problem_number, s.place) for s in scored] == [
        (number, place) for number in range(12) for place in range(11)
    ]
    assert [s.request for s in scored] == pool.requests
    assert [s.sample.sample_id for s in scored] == [r.sample_id for r in pool.requests]
    assert all(s.request.prompt_token_ids == (s.problem_number,) for s in scored)
    assert all(s.reward == len(s.sample.token_ids) for s in scored)
    assert all((s.fault == "timeout") == (s.problem_number == 5) for s in scored)
    # Each was handed on as it was scored.
    assert ended != scored
    assert sorted(ended, key=lambda s: (s.problem_number, s.place)) == scored


def test_problems_that_are_too_long_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    everything, _, _ = generate()
    monkeypatch.setattr(FakeChat, "long", frozenset({"0", "7"}))
    scored, _, pool = generate(max_prompt_tokens=2)
    kept = [s for s in everything if s.problem_number not in (0, 7)]
    assert scored == kept, "the other problems keep their numbers, ids and seeds"
    assert len(pool.requests) == 110
    assert "2 of 12 problems are too long: p0 (3 tokens), p7 (3 tokens)" in caplog.text
    assert len(generate(max_prompt_tokens=3)[0]) == 132
    with pytest.raises(ConfigError, match=r"12 of 12 problems .*max_model_len"):
        generate(max_prompt_tokens=0)


class LongTailPool(FakePool):
    """The last samples end only when an extra problem has begun, as in a long tail."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.order = random.Random(seed)
        self.more = asyncio.Event()

    async def generate(
        self, requests: Sequence[SampleRequest], are_turns: bool = False
    ) -> AsyncIterator[Sample]:
        self.calls.append([r.sample_id for r in requests])
        if len(self.calls) > 1:
            self.more.set()
        shuffled = self.order.sample(requests, len(requests))
        for left, request in zip(range(len(requests), 0, -1), shuffled, strict=True):
            await (asyncio.sleep(0) if left > 2 else self.more.wait())
            yield Sample(request.sample_id, (1,) * 8, (), "stop", "engine-0", 4, 0.0, 0.0, 0.0)


def replaced(
    seed: int, without_signal: set[int], num_wanted: int = 4, wrong: int | None = None
) -> tuple[list[Scored], LongTailPool]:
    """Roll out groups of 2 of the twelve problems; some of the groups have no signal."""
    pool = LongTailPool(seed)
    made = small_run(
        sampling={"prompts_per_step": num_wanted, "group_size": 2, "max_tokens": 8},
        algorithm={"overlong_tokens": 4, "overlong_penalty": 0.5},
    )
    chat: Any = FakeChat()
    live = Live(Path("live.json"), 1, pool, NoHarvest(), TailForecast(), lambda *_: None)
    rewards: Any = FakeRewards()
    rollouts = Rollouts(made, chat, pool, rewards, NoHarvest(), live, 2)  # type: ignore[arg-type]
    numbers: list[int] = []

    def on_scored(each: Scored) -> bool:
        numbers.append(each.problem_number)
        if each.problem_number == wrong:
            raise EngineError("a sample that no policy drew")
        return numbers.count(each.problem_number) == 2 and each.problem_number in without_signal

    scored = asyncio.run(rollouts.generate(2, PROBLEMS, 4, Stopwatch(), on_scored))
    return scored, pool


@pytest.mark.parametrize("seed", range(5))
def test_extra_problems_start_in_the_tail_and_do_not_depend_on_the_order(seed: int) -> None:
    scored, pool = replaced(seed, {0, 1, 2, 3, 4, 6})
    assert [s.problem_number for s in scored] == [n for n in range(10) for _ in range(2)]
    assert [s.request.sample_id for s in scored[:3]] == [
        "2/00000/0000",
        "2/00000/0001",
        "2/00001/0000",
    ]
    assert pool.calls[0] == [s.request.sample_id for s in scored[:8]]
    assert sorted(pool.calls[1:]) == [
        [s.request.sample_id for s in scored[n : n + 2]] for n in range(8, 20, 2)
    ]
    with_reward = [s for s in scored if s.fault is None]
    assert {s.reward for s in with_reward} == {7.5}, "a response of max_tokens loses the penalty"
    assert {s.reward for s in scored if s.fault} == {8.0}


def test_extra_problems_end_and_replace_problems_that_are_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(replaced(0, set(range(12)))[0]) == 24
    monkeypatch.setattr(FakeChat, "long", frozenset({"1", "4"}))
    scored, pool = replaced(0, {5})
    assert sorted({s.problem_number for s in scored}) == [0, 2, 3, 5, 6]
    assert len(pool.calls[0]) == 8


def test_an_error_while_extra_problems_are_generated_ends_the_run() -> None:
    with pytest.raises(EngineError, match="no policy drew"):
        replaced(0, {0, 1, 2, 3}, wrong=5)


def test_a_sample_of_another_policy_ends_the_run() -> None:
    with pytest.raises(EngineError, match="another policy"):
        generate(policy_version=5)


def test_a_held_out_set_has_its_own_samples_and_reward() -> None:
    pool = FakePool()
    rollouts, _ = made_rollouts(pool)
    chosen = HeldOut("aime", "", PROBLEMS[:4], lambda problem, text: 7.0, 3, 0.5)
    scored = asyncio.run(rollouts.evaluate(6, chosen, 4, Stopwatch()))
    assert [(s.problem_number, s.place) for s in scored] == [
        (n, p) for n in range(4) for p in range(3)
    ]
    assert all(s.reward == 7.0 for s in scored)
    assert pool.requests[0].sample_id == "eval-6-aime/00000/0000"
    assert {r.sampling.temperature for r in pool.requests} == {0.5}
    assert len({r.sampling.seed for r in pool.requests}) == 12


def test_forced_lengths_are_the_same_in_every_run() -> None:
    lengths = {"median": 5, "p95": 20, "longest": 40}
    first, second = (generate(forced_lengths=lengths)[2].requests for _ in range(2))
    assert first == second
    assert all(r.sampling.ignore_eos for r in first)
    assert len({r.sampling.max_tokens for r in first}) > 5
    assert max(r.sampling.max_tokens for r in first) <= 40


def test_ids_and_seeds_of_requests_do_not_change() -> None:
    """Runs of earlier versions can be repeated only if they stay as they are."""
    requests = make_requests(config(), "7", [(1,), (2,)], 2, 0.5, 7)
    assert [r.sample_id for r in requests] == [
        *("7/00000/0000", "7/00000/0001"),
        *("7/00001/0000", "7/00001/0001"),
    ]
    assert [r.sampling.seed for r in requests] == [
        8431337025625353700,
        7672311679339759576,
        3994478063806166815,
        6615903725128996376,
    ]
    (evaluated, _) = make_requests(config(), "eval-0", [(1,), (2,)], 1, 0.0, None)
    assert evaluated.sampling.seed == 2598586660346330594
    assert evaluated.sampling.max_tokens == 64
    assert not evaluated.sampling.ignore_eos


def test_no_two_samples_share_a_seed() -> None:
    made = [make_requests(config(), step, [(1,)] * 500, 20, 1.0, 0) for step in ("1", "2")]
    seeds = {request.sampling.seed or 0 for requests in made for request in requests}
    assert len(seeds) == 20_000
    assert 2**62 < max(seeds) < 2**63  # what vLLM takes as a seed
