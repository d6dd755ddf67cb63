"""Learner ranks without a model, in simulated time, behind a layer of faults.

A policy is one number, which follows from all samples that the ranks were given.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from fault_layer import Actor, Layer

from tlt.harvest.published import EMBEDDING
from tlt.learner.actor import LearnerPlan, Rows
from tlt.learner.calls import InOrder, RankFailed, RankGone
from tlt.node.weights import SharedWeights
from tlt.states.writer import Stored

FIRST_POLICY = 1
KILL_S = 0.3
SUMS = (
    *("loss", "tokens", "computed_tokens", "rows", "clipped_tokens", "capped_tokens"),
    *("gap", "kl", "entropy"),
)


def digest(*values: Any) -> int:
    """Return a number below 2**60 that follows from these values."""
    text = json.dumps(values).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 4


class Meeting:
    """Where ranks of one start exchange numbers: a collective that waits for all of them."""

    all: ClassVar[dict[str, Meeting]] = {}

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._given: dict[int, dict[int, int]] = {}
        self._changed = asyncio.Condition()

    async def total(self, number: int, rank: int, value: int) -> int:
        given = self._given.setdefault(number, {})
        async with self._changed:
            given[rank] = value
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(given) == self._num_ranks)
        return sum(given.values())


class Rank(Actor):
    """A rank whose share of the gradient is a sum of numbers."""

    names = itertools.count()

    def __init__(self, plan: LearnerPlan, rank: int, shared: list[SharedWeights]) -> None:
        super().__init__(KILL_S)
        self.plan, self.rank, self.shared = plan, rank, shared
        self.calls, self.turn = InOrder(), asyncio.Lock()
        self.policy, self.gradient, self.steps = FIRST_POLICY, 0, 0
        self.num_exchanges = 0
        self.saved: Path | None = None

    async def do(self, number: int, method: str, *args: Any) -> Any:
        async with self.turn:
            self.calls.check(number, method)
            await asyncio.sleep(0.01)
            return await getattr(self, method)(*args)

    async def total(self, value: int) -> int:
        """Add up a number of all ranks."""
        self.num_exchanges += 1
        return await self.ranks.total(self.num_exchanges, self.rank, value)

    async def node(self) -> str:
        return "here"

    async def meeting(self, on_one_node: bool) -> str:
        name = f"meeting-{next(Rank.names)}"
        Meeting.all[name] = Meeting(self.plan.num_ranks)
        return name

    async def start(self, meeting: str, saved: str | None, ranks_here: int) -> int:
        self.ranks = Meeting.all[meeting]
        if saved is not None:
            state = json.loads((Path(saved) / f"{self.rank}.json").read_text())
            self.policy, self.steps = state["policy"], state["steps"]
        await self.total(0)
        return 1

    async def accumulate(self, rows: Rows, rl_step: int) -> None:
        samples = [sample for row in rows for sample in row]
        self.gradient += sum(
            digest(s.sample_id, s.response_ids, round(s.advantage, 6), rl_step) for s in samples
        )

    async def step(self, denominator: float, max_gap: float) -> Any:
        total = await self.total(self.gradient)
        self.gradient = 0
        self.policy = digest(self.policy, total, denominator)
        self.steps += 1
        sums = SimpleNamespace(**dict.fromkeys(SUMS, 0.0), learned_tokens=1.0)
        report = SimpleNamespace(sums=sums, grad_norm=1.0, lr=1e-3, skipped=False, refused=False)
        return report, Stored()

    async def publish(self, dtype: str, same_node: bool) -> str | None:
        await self.total(0)
        if self.rank:
            return None
        self.shared.append(SharedWeights([(EMBEDDING, torch.tensor([[self.policy]]))]))
        return str(self.shared[-1].path)

    async def save(self, folder: str) -> None:
        self.saved, self.state = Path(folder), {"policy": self.policy, "steps": self.steps}

    async def wait_saved(self) -> str:
        await asyncio.sleep(0.5)
        assert self.saved is not None
        self.saved.mkdir(parents=True, exist_ok=True)
        (self.saved / f"{self.rank}.json").write_text(json.dumps(self.state))
        return ""


class RankHandle:
    """The driver's handle on a rank, behind the layer of faults."""

    def __init__(
        self, layer: Layer, shared: list[SharedWeights], plan: LearnerPlan, rank: int
    ) -> None:
        self.layer, self.rank, self.number = layer, Rank(plan, rank, shared), 0

    async def call(self, command: Any, *args: Any) -> Any:
        self.number += 1
        work = partial(self.rank.do, self.number, command.__name__, *args)
        return await self.layer.call(self.rank, work, RankFailed, RankGone)

    async def call_beside(self, command: Any, *args: Any) -> Any:
        work = partial(getattr(self.rank, command.__name__), *args)
        return await self.layer.call(self.rank, work, RankFailed, RankGone)

    async def kill(self) -> None:
        await self.rank.kill()
