"""The learner group with ranks that fail, hang and die: an error names the rank in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from fault_layer import run

from tlt.errors import LearnerLost
from tlt.learner.actor import LearnerActor
from tlt.learner.calls import RankFailed, RankGone
from tlt.learner.group import BLAME_S, LearnerGroup
from tlt.simulate.clock import now_s

LIMIT_S = 30.0


class Rank:
    """A rank that answers after a second, unless told otherwise."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fault: tuple[str, Exception | None] = ("", None)
        """The method that goes wrong, and its error; None never answers."""
        self.after_s = 1.0
        self.killed = False

    async def call(self, command: Callable[..., Any], *args: Any) -> Any:
        method = command.__name__
        await asyncio.sleep(self.after_s)
        if self.fault[0] == method:
            if self.fault[1] is None:
                await asyncio.sleep(1e6)
            assert self.fault[1] is not None
            raise self.fault[1]
        return {"node": "here", "meeting": "m", "start": self.rank, "wait_saved": ""}.get(method)

    async def call_beside(self, command: Callable[..., Any], *args: Any) -> Any:
        return await self.call(command, *args)

    async def kill(self) -> None:
        self.killed = True
        if self.fault[0] == "kill":
            raise RankFailed("not to be killed")


def group() -> tuple[LearnerGroup, list[Rank]]:
    ranks: list[Rank] = []

    def spawn(plan: object, rank: int, options: object) -> Any:
        ranks.append(Rank(rank))
        return ranks[-1]

    plan = SimpleNamespace(num_ranks=3, row_tokens=64, timeout_s=LIMIT_S, buffer=None)
    return LearnerGroup(cast(Any, plan), spawn=spawn, here=lambda: "here"), ranks


@pytest.mark.parametrize("method", ["free_cache", "wait_saved"])
@pytest.mark.parametrize(
    ("fault", "says", "within_s"),
    [
        (RankFailed("out of memory"), r"rank 1 failed \(METHOD\): out of memory", 1 + BLAME_S),
        (RankGone("killed"), r"rank 1 is gone \(METHOD\): killed", 1 + BLAME_S),
        (None, r"METHOD took more than 30 s .*learner\.timeout_s.* rank 1$", LIMIT_S),
    ],
)
def test_a_lost_rank_is_named_within_the_limit(
    method: str, fault: Exception | None, says: str, within_s: float
) -> None:
    async def scene() -> None:
        learner, ranks = group()
        assert await learner.start() == [0, 1, 2]
        ranks[1].fault = (method, fault)
        args = {"wait_saved": (cast(Any, "x"), None, 1)}
        started_s = now_s()
        with pytest.raises(LearnerLost, match=says.replace("METHOD", method)):
            await getattr(learner, method)(*args.get(method, ()))
        assert now_s() - started_s <= within_s
        await learner.stop()
        assert all(rank.killed for rank in ranks)

    run(scene(), 100.0)


def test_the_rank_that_is_gone_is_blamed_and_not_the_one_that_missed_it() -> None:
    """In a collective the others fail first, of a connection that is closed."""

    async def scene() -> None:
        learner, ranks = group()
        await learner.start()
        ranks[0].fault = ("free_cache", RankFailed("connection closed by peer"))
        ranks[2].fault, ranks[2].after_s = ("free_cache", RankGone("killed")), 2.0
        with pytest.raises(LearnerLost, match="rank 2 is gone"):
            await learner.free_cache()

    run(scene(), 100.0)


def test_ranks_that_cannot_be_ended_do_not_keep_the_run_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        learner, ranks = group()
        await learner.start()
        ranks[1].fault = ("kill", None)
        await learner.stop()
        assert "learner rank 1 could not be ended" in caplog.text
        assert await learner.start() == [0, 1, 2]
        assert len(ranks) == 6

    run(scene(), 100.0)


def test_the_process_of_a_rank_does_nothing_twice() -> None:
    class Recording(LearnerActor):
        def accumulate(self, rows: object, rl_step: int) -> None:
            taken.append(rl_step)

    taken: list[int] = []
    rank = Recording(cast(Any, None), 0)
    rank.do(1, "accumulate", [], 7)
    with pytest.raises(RankFailed):
        rank.do(1, "accumulate", [], 7)
    with pytest.raises(RankFailed):
        rank.do(3, "accumulate", [], 9)
    rank.do(2, "accumulate", [], 8)
    assert taken == [7, 8]
