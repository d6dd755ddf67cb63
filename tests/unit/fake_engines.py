"""Fake engines of a pool, and a pool that runs on them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tlt.config.rollout import PoolConfig
from tlt.contracts import FinishReason, Sample, SampleRequest, SamplingSpec, Text
from tlt.errors import EngineError
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Verdict


def request(index: int, max_tokens: int = 5) -> SampleRequest:
    return SampleRequest(str(index), (1,), SamplingSpec(max_tokens, seed=index), rl_step=1)


@dataclass
class FakeEngine:
    """Generates one token per tick for each of its slots; fails as its options say."""

    name: str
    slots: int = 4
    tick_s: float = 0.001
    is_keyed: bool = False  # the request alone decides the length and tokens of its response
    rounds_by_batch: bool = False
    dead: bool = False
    error: Exception = field(default_factory=lambda: EngineError("gone"))  # of a dead one
    refuse_requests: Exception | None = None
    refuse_commands: Exception | None = None
    break_off: set[str] = field(default_factory=set)  # samples that end once by an error
    always_break: bool = False  # not only once
    stuck_in: str = ""  # a method that never returns
    submit_s: float = 0.0
    stop_s: float = 0.0
    fail_submission: int = 0  # the first submission is 1
    long_rechecks: bool = False  # a recheck lasts until it is told to end

    def __post_init__(self) -> None:
        self.waiting: list[SampleRequest] = []
        self.submitted: list[SampleRequest] = []
        self.texts: list[tuple[str, int, Text]] = []
        self.running: dict[str, list[Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.num_withdrawals = 0
        self.stopped = False
        self.recheck_ended = asyncio.Event()

    async def _stick(self, method: str) -> None:
        if method == self.stuck_in:
            await asyncio.sleep(60)

    async def start(self) -> dict[str, Any]:
        await self._stick("start")
        await asyncio.sleep(self.tick_s)
        return {"slots": self.slots, "rounds_by_batch": self.rounds_by_batch}

    async def stop(self, graceful: bool) -> None:
        await asyncio.sleep(self.stop_s)
        self.stopped = True
        await self._stick("stop")

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = command.__name__
        await self._stick(name)
        if (own := getattr(self, name, None)) is not None:
            return await own(*args)
        self.calls.append((name, args))
        self.options[name] = kwargs
        if self.refuse_commands:
            raise self.refuse_commands
        if name == "end_recheck":
            self.recheck_ended.set()
        if name == "recheck" and self.long_rechecks:
            await self.recheck_ended.wait()
            if self.dead:
                raise EngineError("gone")
            return None
        return Verdict(None, 0.0) if name == "recheck" else 0.0

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        if self.refuse_requests:
            raise self.refuse_requests
        self.fail_submission -= 1
        if self.fail_submission == 0:
            raise EngineError("the network was away")
        await asyncio.sleep(self.submit_s)
        self.submitted.extend(requests)
        self.waiting.extend(requests)

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        self.num_withdrawals += 1
        taken = [r.sample_id for r in self.waiting if r.sample_id in set(sample_ids)]
        self.waiting = [r for r in self.waiting if r.sample_id not in set(taken)]
        return taken

    async def take_finished(self, timeout_s: float) -> list[Sample]:
        await asyncio.sleep(self.tick_s)
        if self.dead:
            raise self.error
        while self.waiting and len(self.running) < self.slots:
            r = self.waiting.pop(0)
            self.running[r.sample_id] = [*self.drawn(r)]
        ended = []
        for sample_id, state in list(self.running.items()):
            state[1] -= 1
            if state[1] <= 0:
                del self.running[sample_id]
                reason: FinishReason = "error" if sample_id in self.break_off else "stop"
                if not self.always_break:
                    self.break_off.discard(sample_id)
                ended.append(
                    Sample(sample_id, state[0], (), reason, self.name, 0, 0.0, 0.0, time.time())
                )
        return ended

    def drawn(self, request: SampleRequest) -> tuple[tuple[int, ...], int]:
        """Return the response's tokens, and the ticks that they take."""
        if not self.is_keyed:
            return (0,), request.sampling.max_tokens
        rng = random.Random(request.sampling.seed)
        length = rng.randint(1, request.sampling.max_tokens)
        return tuple(rng.randrange(100) for _ in range(length)), length

    async def take_texts(self) -> list[tuple[str, int, Text]]:
        texts, self.texts = self.texts, []
        return texts

    async def held(self) -> list[str]:
        return [*self.running, *(r.sample_id for r in self.waiting)]


class Engines(dict[str, FakeEngine]):
    """Makes fake engines with the same options, and keeps them by name."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, name: str) -> FakeEngine:
        self[name] = FakeEngine(name, **self.options)
        return self[name]

    def set(self, **options: Any) -> None:
        """Change the engines that are there; their successors have the first options."""
        for engine in self.values():
            for name, value in options.items():
                setattr(engine, name, value)

    def commands(self, name: str) -> list[tuple[str, Any]]:
        """Return engine and first argument of every such command."""
        return [(e.name, args[0]) for e in self.values() for m, args in e.calls if m == name]


@asynccontextmanager
async def started(made: Engines, num_engines: int = 2, **limits: Any) -> AsyncIterator[RolloutPool]:
    settings = PoolConfig(num_engines=num_engines, **limits)
    async with asyncio.timeout(30), RolloutPool(settings, made) as pool:
        yield pool


async def generate(pool: RolloutPool, num: int, max_tokens: int = 5) -> list[Sample]:
    """Generate samples, and check that each one comes once."""
    samples = [s async for s in pool.generate(request(i, max_tokens) for i in range(num))]
    assert sorted(int(sample.sample_id) for sample in samples) == list(range(num))
    return samples


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
