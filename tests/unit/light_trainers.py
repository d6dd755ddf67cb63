"""Trainers of drafters without a model, in simulated time, behind a layer of faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
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

    def spawn(self, worker: str) -> Handle:
        self.all.append(Trainer(self, worker))
        return Handle(self.all[-1])

    def working(self, worker: str) -> bool:
        """Return whether a living trainer uses the worker's device."""
        return any(t.working and t.worker == worker and not t.dead.is_set() for t in self.all)


class Trainer(Actor):
    """A trainer's process: one call after the other, `end` and `export` beside them."""

    def __init__(self, trainers: Trainers, worker: str) -> None:
        super().__init__(trainers.kill_s)
        self.trainers, self.worker = trainers, worker
        self.holder = Holder()
        self.turn = asyncio.Lock()
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

    async def merge(self, lease: int) -> bool:
        if not await self.work(lease, 0.2):
            return False
        self.weights = next(self.trainers.numbers)
        return True

    async def export(self) -> Any:
        return self.trainers.blob(self.weights)

    async def release(self) -> None:
        self.holder.end_current()

    async def nothing(self) -> None: ...


class Handle:
    """The coordinator's handle on a trainer, behind the layer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.trainers = trainer.trainers

    async def start(self) -> None:
        await self._beside(self.trainer.nothing)

    async def begin(self, lease: int, seconds: float) -> bool:
        self.trainers.expires_s[lease] = now_s() + seconds
        return await self._call(lambda: self.trainer.begin(lease, seconds))

    async def end(self, lease: int) -> None:
        self.trainers.called_back_s.setdefault(lease, now_s())
        await self._beside(lambda: self.trainer.end(lease))

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        await self._call(self.trainer.nothing)

    async def train(self, lease: int, seconds: float) -> Trained:
        return await self._call(lambda: self.trainer.train(lease, seconds))

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        return await self._call(lambda: self.trainer.evaluate(lease, seconds))

    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool:
        return await self._call(lambda: self.trainer.merge(lease))

    async def export(self) -> Any:
        return await self._beside(self.trainer.export)

    async def optimizer_state(self) -> Any:
        return await self._call(self.trainer.nothing)

    async def release(self) -> None:
        await self._call(self.trainer.release)

    async def kill(self) -> None:
        await self.trainer.kill()

    async def _call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Call the trainer behind its other calls."""

        async def in_turn() -> Any:
            async with self.trainer.turn:
                return await work()

        return await self._beside(in_turn)

    async def _beside(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def arrived() -> Any:
            return await work()

        return await self.trainers.layer.call(self.trainer, arrived, TrainerFailed, TrainerGone)


class ScriptedTrainer:
    """Weights are a number: how many sessions were learned, of all trainers it goes back to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = 0.0
        self.has: int | None = 0
        self.ended = 0
        self.working = False
        self.dead = False
        self.deaf = False
        self.better = True
        self.fails: Exception | None = None
        self.starved = False
        self.at_evaluation: Callable[[], Awaitable[None]] | None = None
        self.at_training: Callable[[], Awaitable[None]] | None = None
        self.breaks_off = False
        self.asked_s: list[float] = []
        self.merged_with: list[list[tuple[float, float]]] = []
        self.taken: list[tuple[Any, ...]] = []
        self.cannot_be_killed = self.outlives_kills = False
        self._death = asyncio.Event()

    async def _alive(self) -> None:
        await asyncio.sleep(0)
        if self.dead:
            raise TrainerGone

    async def start(self) -> None:
        await self._alive()

    async def begin(self, lease: int, seconds: float) -> bool:
        await self._alive()
        return lease > self.ended

    async def end(self, lease: int) -> None:
        await self._alive()
        if not self.deaf:
            self.ended = max(self.ended, lease)

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        await self._alive()
        self.taken.append(tuple(w if w is None else w.blob for w in (base, published, policy)))
        if base is not None:
            assert base.version != self.has, "it has these weights already"
            self.has, self.weights = base.version, base.blob if base.version else 0.0

    async def train(self, lease: int, seconds: float) -> Trained:
        await self._alive()
        self.asked_s.append(seconds)
        if self.at_training is not None:
            await self.at_training()
        if self.fails is not None:
            raise self.fails
        if self.starved:
            return Trained(0, 0, 0.0, True)
        self.working = True
        ends = asyncio.get_running_loop().time() + seconds
        while self.deaf or (
            asyncio.get_running_loop().time() < ends and lease > self.ended and not self.dead
        ):
            try:
                async with asyncio.timeout(0.002):
                    await self._death.wait()
                break
            except TimeoutError:
                pass
        self.working = False
        await self._alive()
        self.weights += 1
        self.has = None
        return Trained(1, 100, 0.5, False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        await self._alive()
        if self.at_evaluation is not None:
            await self.at_evaluation()
        if self.breaks_off:
            return None
        return None if lease <= self.ended else Evaluation(self.better, 2.0 + self.weights, 2.0)

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

    async def release(self) -> None:
        await self._alive()

    async def kill(self) -> None:
        if self.cannot_be_killed:
            raise ZeroDivisionError("no cluster")
        if self.outlives_kills:
            await asyncio.sleep(1e9)
        self.dead, self.working = True, False
        self._death.set()
        await asyncio.sleep(0)
