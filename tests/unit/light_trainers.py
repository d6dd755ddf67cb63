"""Trainers of drafters without a model, in simulated time, behind a layer of faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from fault_layer import Actor, Layer

from tlt.harvest.contract import Evaluation, Trained, TrainerFailed, TrainerGone, Weights
from tlt.harvest.leases import Holder
from tlt.simulate.clock import now_s


@dataclass(eq=False)
class Trainers:
    """All trainers of a run, and what the coordinator asked of them."""

    layer: Layer
    is_used: Callable[[str], bool]
    """Whether the run uses a worker's device."""
    kill_s: float
    blob: Callable[[int], Any] = lambda number: number
    """The weights with this number, as trainers export them."""
    all: list[Trainer] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    expires_s: dict[int, float] = field(default_factory=dict)
    """When each lease runs out."""
    called_back_s: dict[int, float] = field(default_factory=dict)
    lease_of: dict[int, int] = field(default_factory=dict)
    """The lease under which the weights with a number were evaluated."""

    def spawn(self, worker: str) -> Any:
        self.all.append(Trainer(self, worker))
        return Handle(self.all[-1])

    def working(self, worker: str) -> bool:
        """Return whether a living trainer uses the worker's device."""
        return any(t.working and t.worker == worker and not t.dead.is_set() for t in self.all)


class Trainer(Actor):
    """A trainer's process."""

    def __init__(self, trainers: Trainers, worker: str) -> None:
        super().__init__(trainers.kill_s)
        self.trainers, self.worker = trainers, worker
        self.holder = Holder()
        self.working = False
        self.weights = 0

    async def begin(self, lease: int, seconds: float) -> bool:
        return self.holder.begin(lease, seconds, now_s())

    async def end(self, lease: int) -> None:
        self.holder.end(lease)

    async def work(self, lease: int, seconds: float) -> bool:
        """Use the worker's device until the time is over or the lease ends."""
        until_s = now_s() + seconds
        while self.holder.holds(lease, now_s()) and not self.dead.is_set():
            if self.trainers.is_used(self.worker):
                raise AssertionError(f"a trainer works where the run uses {self.worker}")
            self.working = True
            if now_s() >= until_s:
                break
            await asyncio.sleep(0.1)
        self.working = False
        return self.holder.holds(lease, now_s())

    async def train(self, lease: int, seconds: float) -> Trained:
        await self.work(lease, seconds)
        self.weights = next(self.trainers.numbers)
        return Trained(1, 100, 0.5, starved=self.trainers.layer.rng.random() < 0.05)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        self.trainers.lease_of[self.weights] = lease
        better = self.trainers.layer.rng.random() < 0.5
        return Evaluation(better, 2.0, 1.9) if await self.work(lease, 0.2) else None

    async def merge(self, lease: int, *others: object) -> bool:
        if not await self.work(lease, 0.2):
            return False
        self.weights = next(self.trainers.numbers)
        return True

    async def export(self) -> Any:
        return self.trainers.blob(self.weights)

    async def release(self) -> None:
        self.holder.end_current()

    async def nothing(self, *weights: object) -> None: ...

    start = take = optimizer_state = nothing


class Handle:
    """The coordinator's handle on a trainer, behind the layer.

    One call is made after the other; `start`, `end` and `export` are made beside them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._turn = asyncio.Lock()
        self.kill = trainer.kill

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._trainer, name)
        turn = nullcontext() if name in ("start", "end", "export") else self._turn

        async def call(*args: Any) -> Any:
            async def arrived() -> Any:
                async with turn:
                    return await method(*args)

            trainers = self._trainer.trainers
            if name == "begin":
                trainers.expires_s[args[0]] = now_s() + args[1]
            if name == "end":
                trainers.called_back_s.setdefault(args[0], now_s())
            return await trainers.layer.call(self._trainer, arrived, TrainerFailed, TrainerGone)

        return call


class ScriptedTrainer:
    """Weights are a number: how many sessions were learned, of all trainers it goes back to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = 0.0
        self.has: int | None = 0
        self.ended = 0
        self.working = self.dead = False
        self.deaf = self.breaks_off = self.cannot_be_killed = self.outlives_kills = False
        self.better = True
        self.answers_s = self.evaluates_s = 0.0
        """Seconds until the trainer answers a call, and those of an evaluation."""
        self.asked_s: list[float] = []
        self.merged_with: list[list[tuple[float, float]]] = []
        self.taken: list[tuple[Any, ...]] = []

    async def _alive(self) -> None:
        await asyncio.sleep(self.answers_s)
        if self.dead:
            raise TrainerGone

    start = release = _alive

    async def begin(self, lease: int, seconds: float) -> bool:
        await self._alive()
        return lease > self.ended

    async def end(self, lease: int) -> None:
        await self._alive()
        if not self.deaf:
            self.ended = max(self.ended, lease)

    async def take(self, base: Weights | None, *others: Weights | None) -> None:
        await self._alive()
        self.taken.append(tuple(w if w is None else w.blob for w in (base, *others)))
        if base is not None:
            assert base.version != self.has, "it has these weights already"
            self.has, self.weights = base.version, base.blob if base.version else 0.0

    async def train(self, lease: int, seconds: float) -> Trained:
        await self._alive()
        self.asked_s.append(seconds)
        self.working = True
        ends_s = now_s() + seconds
        while not self.dead and (self.deaf or (now_s() < ends_s and lease > self.ended)):
            await asyncio.sleep(0.002)
        self.working = False
        await self._alive()
        self.weights += 1
        self.has = None
        return Trained(1, 100, 0.5, False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        await self._alive()
        await asyncio.sleep(self.evaluates_s)
        if self.breaks_off or lease <= self.ended:
            return None
        return Evaluation(self.better, 2.0 + self.weights, 2.0)

    async def merge(self, lease: int, others: list[Any], own_weight: float, seconds: float) -> bool:
        await self._alive()
        self.merged_with.append(others)
        total = own_weight + sum(share for _, share in others)
        self.weights = (self.weights * own_weight + sum(w * s for w, s in others)) / total
        return True

    async def export(self) -> float:
        await self._alive()
        return self.weights

    async def optimizer_state(self) -> str:
        await self._alive()
        return f"state of {self.name}"

    async def kill(self) -> None:
        if self.cannot_be_killed:
            raise ZeroDivisionError("no cluster")
        if self.outlives_kills:
            await asyncio.sleep(1e9)
        self.dead, self.working = True, False
        await asyncio.sleep(0)
