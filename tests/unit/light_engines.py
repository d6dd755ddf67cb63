"""Engines without a model, in simulated time, behind a layer of faults.

What an engine draws follows from its policy, the request's seed and the request's prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fault_layer import Actor, Layer
from light_ranks import FIRST_POLICY, KILL_S
from light_trainers import Trainers

from tlt.contracts import EngineStats, Sample, SampleRequest
from tlt.errors import EngineError, EngineGone
from tlt.node.weights import read_weights
from tlt.rollout.client import Engine as Commands
from tlt.rollout.client import place_of


class Surroundings(Protocol):
    """What engines know of the world."""

    layers: list[Layer]
    trainers: Trainers
    engines: list[Engine]
    drafters: dict[int, int]
    draw: Callable[[random.Random, SampleRequest], tuple[int, ...]]


def numbers(noise: random.Random, request: SampleRequest) -> tuple[int, ...]:
    """Draw a response of a few numbers."""
    return tuple(noise.randrange(1000) for _ in range(noise.randrange(1, 8)))


class Engine(Actor):
    """An engine without a model: two requests at a time, each takes as long as its seed says."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__(KILL_S)
        self.world, self.name = world, name
        self.policy, self.version = FIRST_POLICY, 0
        self.waiting: dict[str, SampleRequest] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.finished: list[Sample] = []
        self.news = asyncio.Event()
        world.engines.append(self)

    async def kill(self) -> None:
        await super().kill()
        for task in self.running.values():
            task.cancel()

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            if request.sample_id not in self.held():
                self.waiting[request.sample_id] = request
        self.run_next()

    def run_next(self) -> None:
        while self.waiting and len(self.running) < 2:
            sample_id = next(iter(self.waiting))
            work = self.generate(self.waiting.pop(sample_id))
            self.running[sample_id] = asyncio.ensure_future(work)

    async def generate(self, request: SampleRequest) -> None:
        worker = place_of(self.name)
        if self.world.trainers.working(worker):
            error = AssertionError(f"an engine generates where a trainer works: {worker}")
            self.world.layers[0].wrong.append(error)
        noise = random.Random(f"{self.policy}/{request.sampling.seed}")
        await asyncio.sleep(noise.paretovariate(1.2) * 0.2)
        tokens = self.world.draw(noise, request)
        at = (0.0, 0.0, 0.0)
        self.finished.append(
            Sample(request.sample_id, tokens, (), "stop", self.name, self.version, *at)
        )
        del self.running[request.sample_id]
        self.news.set()
        self.run_next()

    def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        taken = [sample_id for sample_id in sample_ids if sample_id in self.waiting]
        for sample_id in taken:
            del self.waiting[sample_id]
        return taken

    def take_texts(self) -> list[Any]:
        return []

    def held(self) -> list[str]:
        return [*self.waiting, *self.running, *(sample.sample_id for sample in self.finished)]

    async def take_finished(self) -> list[Sample]:
        self.news.clear()
        if not self.finished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.news.wait()
        finished, self.finished = self.finished, []
        return finished

    def update_policy(self, manifest: dict[str, Any], version: int) -> float:
        if self.running or self.waiting:
            raise EngineError("a policy update now would mix two policies")
        ((_, tensor),) = read_weights(manifest["path"])
        self.policy, self.version = int(tensor.item()), version
        return 0.0

    def update_drafter(self, manifest: dict[str, Any], version: int) -> float:
        ((_, tensor),) = read_weights(manifest["path"])
        content = int(tensor.item())
        assert self.world.drafters.setdefault(version, content) == content, "two drafters, one name"
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(self.name)


class LightProcess:
    def __init__(self, world: Surroundings, name: str) -> None:
        self.engine, self.layer = Engine(world, name), world.layers[0]

    async def start(self) -> dict[str, Any]:
        return await self._call(lambda: {"slots": 2, "cores": [0]})

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if command is Commands.take_finished:
            return await self.layer.call(
                self.engine, self.engine.take_finished, EngineError, EngineGone
            )
        return await self._call(lambda: getattr(self.engine, command.__name__)(*args))

    async def stop(self, graceful: bool) -> None:
        await self.engine.kill()

    async def _call(self, work: Any) -> Any:
        async def arrived() -> Any:
            await asyncio.sleep(0.01)
            return work()

        return await self.layer.call(self.engine, arrived, EngineError, EngineGone)
