"""Harvest in simulated clusters where messages are late and every process may die.

With more seeds: TLT_SIM_SEEDS=1000 pytest tests/unit/simulate/test_faults.py
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tlt.harvest.contract import Evaluation, Trained, TrainerGone
from tlt.harvest.coordinator import CoordinatorSettings
from tlt.harvest.leases import Holder, LeaseSettings
from tlt.simulate import clock
from tlt.simulate.clock import now_s
from tlt.simulate.cluster import Cluster, Learner, Mode, SimTrainer, Simulation, Training
from tlt.simulate.workload import Workload
from tlt.strategy.spec import build_strategy
from tlt.tasks.tail import HeavyTail
from tlt.timing.model import Drafting, EngineModel

SEEDS = int(os.environ.get("TLT_SIM_SEEDS", "12"))
ENGINE = EngineModel(step=0.02, row=0.0005, context=1e-7, drafting=0.002, draft_pass=0.001)
DRAFTING = Drafting({"eagle3": (0.8, 0.64, 0.51, 0.41)})
STOP_TIMEOUT_S = 2.0


class FlakyTrainer(SimTrainer):
    """A trainer that hears everything late, and sometimes fails to start, dies or hangs."""

    def __init__(self, run: FlakyRun, worker: str) -> None:
        super().__init__(run, worker)
        self.run = run
        self.worker = worker
        self.leases = Holder()
        self.is_working = False
        self.killed = asyncio.Event()

    async def start(self) -> None:
        if self.run.happens(0.1):
            raise TrainerGone(self.worker)
        await super().start()

    async def begin(self, lease: int, seconds: float) -> bool:
        await self.run.late()
        self.leases.begin(lease, seconds, now_s())
        return await super().begin(lease, seconds)

    async def end(self, lease: int) -> None:
        await self.run.late()
        self.leases.end(lease)
        await super().end(lease)

    async def train(self, lease: int, seconds: float) -> Trained:
        await self.run.late()
        return await self.working(lease, super().train(lease, seconds))

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        await self.run.late()
        return await self.working(lease, super().evaluate(lease, seconds))

    async def export(self) -> Any:
        await self.run.late()
        return await super().export()

    async def working(self, lease: int, work: Any) -> Any:
        await self.release()  # fails if the trainer is dead
        if not self.leases.holds(lease, now_s()):
            return await work  # refuses and does nothing
        self.run.used_leases.add(lease)
        assert self.worker not in self.run.generating, "it trains while its engine generates"
        self.is_working = True
        try:
            if hangs := self.run.happens(0.03):
                await self.killed.wait()
            if hangs or self.run.happens(0.05):
                work.close()
                await self.kill()
                raise TrainerGone(self.worker)
            return await work
        finally:
            self.is_working = False

    async def kill(self) -> None:
        await super().kill()
        self.is_working = False
        self.killed.set()
        self.run.kills += 1


class FlakyRun(Simulation):
    """A run that checks that no trainer works on a device that an engine or the learner has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trainers: list[FlakyTrainer] = []
        self.used_leases: set[int] = set()
        self.kills = 0
        self.longest_wait_s = 0.0

    def make_trainer(self, worker: str) -> SimTrainer:
        self.trainers.append(FlakyTrainer(self, worker))
        return self.trainers[-1]

    def happens(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    async def late(self) -> None:
        await asyncio.sleep(self.rng.exponential(0.05))

    async def rollout(self, engine_ends: Any, sample_ends: Any) -> None:
        started_s = now_s()
        await super().rollout(engine_ends, sample_ends)
        waited_s = now_s() - started_s - float(engine_ends.max())
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        assert not any(t.is_working for t in self.trainers), "the learner's devices are not free"


def run_flaky(seed: int, num_engines: int, num_steps: int, engine_deaths: float) -> FlakyRun:
    cluster = Cluster(
        ENGINE,
        DRAFTING,
        num_engines,
        Learner(tokens_per_s=2000.0 * num_engines, sync_s=1.0),
        Training(drift=0.05, tokens=50_000, start_s=3.0),
        engine_deaths_per_hour=engine_deaths,
        engine_start_s=20.0,
    )
    leases = LeaseSettings(min_s=2.0, lease_s=15.0, stop_timeout_s=STOP_TIMEOUT_S, max_leases=8)
    harvest = CoordinatorSettings(leases, session_s=5.0, publish=True)
    run = FlakyRun(
        cluster,
        Workload(num_engines, 4, 50.0, HeavyTail(200, 2000, 4000)),
        Mode("tlt", lambda: build_strategy({"kind": "adaptive", "arms": [["eagle3", 3]]}), harvest),
        seed,
        start_power=1.5,
    )
    records = clock.run(run.run(num_steps))
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    versions = [record["drafter_version"] for record in records]
    assert versions == sorted(versions), "an old drafter was published after a newer one"
    assert not any(trainer.is_working for trainer in run.trainers), "a lease never ended"
    # No wait for a device is longer than it takes to kill a trainer that does not answer.
    assert run.longest_wait_s < STOP_TIMEOUT_S + 0.5
    return run


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_rule_is_broken_by_what_dies_or_is_late(seed: int) -> None:
    run = run_flaky(seed, num_engines=4 + seed % 13, num_steps=6, engine_deaths=20.0)
    assert run.used_leases
    assert run.kills


def test_at_four_thousand_workers() -> None:
    run = run_flaky(0, num_engines=4096, num_steps=3, engine_deaths=2.0)
    assert len(run.used_leases) > 8
    assert run.events > 3 * 4000
