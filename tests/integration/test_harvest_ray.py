"""Harvest on a real local Ray cluster, beside real engines: leases, hot swaps, and deaths.

`TLT_KILL_ROUNDS=10` kills everything ten times; by default once.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from workloads import TINY_ARGS, random_prompts

from speed import limit
from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.drafter.trainer import TrainerSettings
from tlt.harvest.coordinator import CoordinatorSettings
from tlt.harvest.leases import LeaseSettings
from tlt.harvest.trainer import HarvestTrainerSettings
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings, SampleBuffer

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores),
    pytest.mark.usefixtures("local_ray"),
]

ROUNDS = int(os.environ.get("TLT_KILL_ROUNDS", "1"))
LONG = 1500
STALL_S = limit(60.0)
"""No rollout may take longer, whatever is killed: an engine's start, and all samples again."""


@pytest.fixture(scope="module")
def trainer_settings(tiny: Path, fresh_drafter: Path) -> Iterator[HarvestTrainerSettings]:
    """An untrained drafter and states to train it on."""
    import shutil

    from learning import tiny_samples

    buffer = BufferSettings(f"/dev/shm/tlt-test-{os.getpid()}", 2**30, 4096, held_out_share=0.2)
    store = SampleBuffer(buffer)
    for index, sample in enumerate(tiny_samples(tiny, 64)):
        store.put(str(index), 1, sample)
    yield HarvestTrainerSettings(
        drafter=str(fresh_drafter),
        policy=str(tiny),
        buffer=buffer,
        trainer=TrainerSettings(
            num_draft_tokens=2, row_tokens=256, lr=3e-3, temperature=1.0, seed=0, bfloat16=False
        ),
        held_out_tokens=256,
    )
    shutil.rmtree(buffer.folder)


class Run:
    """Rollouts in which one engine is soon done, and the harvest beside them."""

    def __init__(self, pool: RolloutPool, harvest: Any) -> None:
        self.pool, self.harvest = pool, harvest
        self.num_rollouts = 0

    async def rollout(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Six short samples and a long one; something is done to the run once a worker trains."""
        self.num_rollouts += 1
        requests = [
            SampleRequest(
                f"{self.num_rollouts}/{index}",
                tuple(prompt),
                SamplingSpec(10 if index else LONG, temperature=0, ignore_eos=True),
            )
            for index, prompt in enumerate(random_prompts(7))
        ]
        self.harvest.rollout_started(len(requests))
        done = asyncio.create_task(self._when_training(meanwhile)) if meanwhile else None
        samples = []
        async with asyncio.timeout(STALL_S):
            async for sample in self.pool.generate(requests):
                samples.append(sample)
                self.harvest.sample_finished()
        await self.harvest.rollout_ended()
        if done is not None and not done.cancel():
            done.result()  # what failed must not look as if it had not come to it
        assert len(samples) == len(requests)
        lengths = {s.sample_id: len(s.token_ids) for s in samples}
        assert lengths == {r.sample_id: r.sampling.max_tokens for r in requests}

    async def _when_training(self, then: Callable[[], Awaitable[None]]) -> None:
        """Act once a trainer is at work, and results have been seen before."""
        while not (self.trained_tokens() and self.harvest.leased()):
            await asyncio.sleep(0.05)
        await then()

    def trained_tokens(self) -> float:
        return float(self.harvest.coordinator.metrics().get("trained_tokens", 0.0))


@asynccontextmanager
async def running(tiny: Path, spot: HarvestTrainerSettings) -> AsyncIterator[Run]:
    from tlt.harvest.published import read_embed_and_head
    from tlt.harvest.session import HarvestSession
    from tlt.rollout.actor import ray_spawner

    engine = EngineConfig(
        model=str(tiny),
        drafter=spot.drafter,
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 2},
        kv_cache_gib=0.25,
        core_group="test-harvest",
        engine_args=TINY_ARGS | {"max_model_len": 1600, "max_num_seqs": 16},
    )
    pool = RolloutPool(PoolConfig(num_engines=2, max_restarts=3 * ROUNDS), ray_spawner(engine))
    leases = LeaseSettings(min_s=0.2, lease_s=60.0, stop_timeout_s=1.0, max_leases=8)
    settings = CoordinatorSettings(leases, session_s=1.0, publish=True)
    harvest = HarvestSession(settings, spot, pool, lambda name: {}, on_gpu=False)
    pool.idle.listener = harvest
    async with pool:
        await harvest.start()
        embedding = read_embed_and_head(tiny)
        harvest.policy_changed(list(embedding.items()), 1)
        run = Run(pool, harvest)
        try:
            async with asyncio.timeout(limit(60)):
                while harvest.coordinator.metrics()["ready"] < 2:
                    await asyncio.sleep(0.2)
            yield run
        finally:
            await harvest.stop()


def processes(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


async def test_an_idle_worker_trains_and_whoever_is_killed_every_sample_comes_once(
    tiny: Path, trainer_settings: HarvestTrainerSettings
) -> None:
    async with running(tiny, trainer_settings) as run:
        await until_published(run)
        record = run.harvest.record()
        assert record["harvest/used_s"] > 0.5 * record["harvest/coverable_s"]
        assert record["harvest/faults"] == 0
        assert record["harvest/kills"] == 0
        assert record["harvest/stop_max_s"] < limit(0.5)
        trainers = processes("ray::TrainerActor")
        assert len(trainers) == 2
        cores = set(run.harvest.workers.values())
        assert {tuple(p.cpu_affinity()) for p in trainers} == cores
        assert len(cores) == 2, "each trainer is on the core of its engine"
        for victim in ("ray::TrainerActor", "ray::EngineActor"):
            for _ in range(ROUNDS):
                await killed_once(run, victim)
                await still_trains(run)
    assert not processes("ray::TrainerActor")


async def until_published(run: Run) -> None:
    for _ in range(12):
        before = {s.engine: s.drafter_version for s in await run.pool.stats()}
        await run.rollout()
        after = {s.engine: s.drafter_version for s in await run.pool.stats()}
        if max(after.values()) > max(before.values()):
            return
    pytest.fail("no drafter was published while engines generated")


async def killed_once(run: Run, title: str) -> None:
    num_killed = 0

    async def strike() -> None:
        nonlocal num_killed
        kill_beside_training(run, title)
        num_killed += 1

    while num_killed == 0:
        assert run.harvest.coordinator.enabled
        await run.rollout(strike)
    await run.pool.wait_ready(2)


async def still_trains(run: Run) -> None:
    trained = run.trained_tokens()
    for _ in range(10):
        await run.rollout()
        if run.trained_tokens() > trained:
            return
        await asyncio.sleep(3.0)  # a trainer takes a while to start again
    pytest.fail("nobody trains any more")


def kill_beside_training(run: Run, title: str) -> None:
    """Kill the process with this title on the cores of a worker that trains."""
    cores = run.harvest.workers[run.harvest.leased()[0]]
    (process,) = [
        process
        for process in processes(title)  # an engine binds its loop's thread alone
        if any(os.sched_getaffinity(thread.id) == {*cores} for thread in process.threads())
    ]
    process.send_signal(signal.SIGKILL)
