"""Seeded faults between the real pool and light engines: the real loop over a core without a model.

Every call of the pool may be dropped, delayed, delivered twice, answered by an error, or delivered
and never answered. Whatever the seed: every sample comes exactly once, from the current policy, and
nothing waits longer than the limits allow. `TLT_FAULT_SEEDS` sets the number of seeds.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from speed import limit
from tlt.config.rollout import PoolConfig
from tlt.contracts import Finished, Recheck, SampleRequest, SamplingSpec
from tlt.errors import EngineError, EngineGone
from tlt.rollout import loop, pool
from tlt.rollout.client import Engine
from tlt.rollout.loop import EngineLoop, Gained
from tlt.rollout.pool import RolloutPool

NUM_SEEDS = int(os.environ.get("TLT_FAULT_SEEDS", "50"))
AT_ONCE = 25
"""Seeds that run at the same time: most of their time is waiting for limits."""
MAX_FAULTS = 4
"""Faults of one seed: five losses of one sample would rightly end its rollout."""
FAULTS = ("drop", "delay", "duplicate", "fail", "fail_late", "hang")
LIMITS = PoolConfig(
    num_engines=3,
    prefetch=2,
    health_timeout_s=limit(0.6),
    command_timeout_s=limit(0.8),
    max_restarts=100,
)
LIMIT_S = limit(40.0)
"""Seconds for two rollouts and two weight updates of `AT_ONCE` seeds on a busy machine."""
NEVER_S = 2 * LIMIT_S


def drawn(request: SampleRequest, version: int) -> tuple[int, ...]:
    """Return the response to a request: seed, policy and place decide each token."""
    noise = random.Random(f"{request.sampling.seed}/{version}")
    return tuple(noise.randrange(1000) for _ in range(request.sampling.max_tokens))


class LightCore:
    """Draws a token of each request in every engine step; others continue what it has begun."""

    def __init__(self) -> None:
        self.version = 0
        self.running: dict[str, tuple[tuple[int, ...], int]] = {}
        """The response to each request, and the number of its tokens so far."""
        self.places: dict[str, int] = {}

    def start(self) -> dict[str, Any]:
        return {"slots": 2}

    def admit(self, request: SampleRequest) -> None:
        assert request.sample_id not in self.running, "the same request twice"
        response = drawn(request, self.version)
        begun = request.begun.token_ids if request.begun else ()
        assert begun == response[: len(begun)], "a text of another policy or request"
        assert len(begun) < len(response)
        self.running[request.sample_id] = response, len(begun)
        self.places[request.sample_id] = len(begun)

    def step(self) -> list[Finished]:
        time.sleep(0.001)
        self.running = {name: (of, count + 1) for name, (of, count) in self.running.items()}
        ended = [name for name, (of, count) in self.running.items() if count == len(of)]
        responses = {name: self.running.pop(name)[0] for name in ended}
        return [
            Finished(name, of, (-0.5,) * len(of), "length", 0.0) for name, of in responses.items()
        ]

    def gained(self) -> list[Gained]:
        found = [(name, self.places[name], *of) for name, of in self.running.items()]
        self.places |= {name: count for name, (_, count) in self.running.items()}
        return [(name, at, of[at:count], (-0.5,) * (count - at)) for name, at, of, count in found]

    def begin_recheck(self, recheck: Recheck) -> None: ...

    def end_recheck(self, recheck: Recheck) -> dict[int, float]:
        return {}

    def stop(self) -> None: ...


class LightEngine(EngineLoop):
    def __init__(self, name: str) -> None:
        self.core = LightCore()
        super().__init__(name, self.core, stall_timeout_s=5.0)

    def update_policy(self, manifest: dict[str, Any], version: int) -> float:
        def update() -> float:
            self.policy_version = self.core.version = version
            return 0.0

        return self.between_rollouts(update, "a policy update now would mix two policies")

    def update_drafter(self, manifest: dict[str, Any], version: int) -> float:
        return self.between_steps(lambda: 0.0)


class FaultyProcess:
    """An engine in this process, behind a layer of faults."""

    def __init__(self, name: str, faults: Iterator[str], threads: ThreadPoolExecutor) -> None:
        self._engine = LightEngine(name)
        self._faults = faults
        self._threads = threads

    async def start(self) -> dict[str, Any]:
        return await self._in_thread(self._engine.start)

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if command is Engine.take_finished:
            args = (0.02,)
        return await self._through(partial(getattr(self._engine, command.__name__), *args))

    async def stop(self, graceful: bool) -> None:
        await self._in_thread(self._engine.shutdown)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _through(self, work: Callable[[], Any]) -> Any:
        fault = next(self._faults)
        if fault == "drop":
            await asyncio.sleep(NEVER_S)
        if fault == "fail":
            raise EngineGone("the call did not arrive")
        if fault == "delay":
            await asyncio.sleep(0.1)
        answer = await self._in_thread(work)
        if fault == "duplicate":
            return await self._in_thread(work)
        if fault == "hang":
            await asyncio.sleep(NEVER_S)
        if fault == "fail_late":
            raise EngineError("the answer did not arrive")
        return answer


def faults_of(seed: int) -> Iterator[str]:
    """Yield what happens to each call of a pool."""
    rng = random.Random(seed)
    at = set(rng.sample(range(8, 90), MAX_FAULTS))
    number = 0
    while True:
        yield rng.choice(FAULTS) if number in at else ""
        number += 1


def requests(label: str) -> list[SampleRequest]:
    return [
        SampleRequest(
            f"{label}/{index}", (1,), SamplingSpec(1 + 7 * index % 23, seed=index), rl_step=1
        )
        for index in range(20)
    ]


async def one_seed(seed: int, threads: ThreadPoolExecutor) -> int:
    faults = faults_of(seed)
    async with RolloutPool(LIMITS, lambda name: FaultyProcess(name, faults, threads)) as pool:
        for version in (1, 2):
            await pool.update_policy([("w", torch.ones(1))], version)
            wanted = requests(f"{seed}-{version}")
            samples = [sample async for sample in pool.generate(wanted)]
            ids = sorted(sample.sample_id for sample in samples)
            assert ids == sorted(request.sample_id for request in wanted), f"seed {seed}"
            assert {sample.policy_version for sample in samples} == {version}, f"seed {seed}"
            responses = {sample.sample_id: sample.token_ids for sample in samples}
            expected = {request.sample_id: drawn(request, version) for request in wanted}
            assert responses == expected, f"seed {seed}"
            assert all(len(s.logprobs) == len(s.token_ids) for s in samples), f"seed {seed}"
            await pool.update_drafter([("w", torch.ones(1))], version)
    return pool.num_kept_tokens


async def in_time(seed: int, work: Coroutine[Any, Any, int]) -> int:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await work
    except TimeoutError:
        raise AssertionError(f"seed {seed} waits for ever") from None


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
async def test_every_sample_exactly_once_whatever_fails(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TEXTS_S", 0.0)
    monkeypatch.setattr(pool, "POLL_S", 0.0)
    seeds = range(first, min(first + AT_ONCE, NUM_SEEDS))
    with ThreadPoolExecutor(8 * len(seeds)) as threads:
        kept = await asyncio.gather(*(in_time(seed, one_seed(seed, threads)) for seed in seeds))
    assert sum(kept) > 0, "no lost sample was continued"
