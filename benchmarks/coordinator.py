"""Dispatch and coordination of thousands of simulated workers in one event loop, as in a driver.

    python benchmarks/coordinator.py [--workers 4096] [--seconds 20] [--repeats 3]

The coordinator and the dispatcher are the real ones. Trainers answer after a few milliseconds
instead of training; engines finish a sample after a few seconds instead of generating it. Workers
become idle and are needed again at random, all the time, while every engine generates: more than
any run asks for. An event is anything that the run or a trainer tells the coordinator. A pause is
how long the event loop did nothing else. The delay of a dispatch is the time from the end of a
sample to its handling, with leases for all workers at once, for as many as by default, and without
the coordinator. Writes benchmarks/results/coordinator.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tlt.config.train import TltConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.harvest.contract import Evaluation, Trained, Weights
from tlt.harvest.coordinator import Coordinator, CoordinatorSettings
from tlt.harvest.leases import LeaseSettings
from tlt.observe.provenance import provenance
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.rollout.lengths import LengthForecast

RESULT = Path(__file__).parent / "results" / "coordinator.json"
PASS_S = 0.03
"""Seconds between two checks of a trainer whether to stop."""
SLOTS = 4
"""Samples that an engine generates at once."""
SAMPLE_S = (2.0, 18.0)
"""Shortest and longest time that a sample takes."""


class Simulated:
    """A trainer that only waits."""

    events = 0

    def __init__(self, worker: str) -> None:
        self.ended = 0
        self.stop = asyncio.Event()

    async def _answer(self) -> None:
        Simulated.events += 1
        await asyncio.sleep(0.001)

    async def start(self) -> None:
        await self._answer()

    async def begin(self, lease: int, seconds: float) -> bool:
        await self._answer()
        self.stop.clear()
        return lease > self.ended

    async def end(self, lease: int) -> None:
        await self._answer()
        self.ended = max(self.ended, lease)
        self.stop.set()

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        await self._answer()

    async def train(self, lease: int, seconds: float) -> Trained:
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
                await asyncio.sleep(random.uniform(0, PASS_S))
        except TimeoutError:
            pass
        await self._answer()
        return Trained(1, 512, 1.0, False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        await self._answer()
        return Evaluation(random.random() < 0.3, 2.0, 2.0)

    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool:
        await self._answer()
        return True

    async def export(self) -> int:
        await self._answer()
        return 0

    async def optimizer_state(self) -> None:
        await self._answer()

    async def release(self) -> None:
        await self._answer()

    async def kill(self) -> None:
        self.stop.set()
        await self._answer()


class Dispatch:
    """A dispatcher whose engines finish samples all the time, and get others for them."""

    def __init__(self, num_engines: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(prefetch=2, forecast=LengthForecast())
        self._rng = random.Random(0)
        self._ends_s: float = 0.0
        self._num_requests = 0
        self.delays: list[float] = []
        for index in range(num_engines):
            self._dispatcher.engine_ready(f"engine-{index}", SLOTS)
        self._submit(num_engines * SLOTS)

    async def run(self, seconds: float) -> None:
        self._ends_s = self._loop.time() + seconds
        self._carry_out()
        await asyncio.sleep(seconds)

    def _submit(self, count: int) -> None:
        first, self._num_requests = self._num_requests, self._num_requests + count
        spec = SamplingSpec(1000)
        self._dispatcher.submit(
            SampleRequest(str(number), (1,) * 8, spec) for number in range(first, first + count)
        )

    def _carry_out(self) -> None:
        for action in self._dispatcher.actions():
            if isinstance(action, Assign):
                for request in action.requests:
                    due_s = self._loop.time() + self._rng.uniform(*SAMPLE_S)
                    self._loop.call_at(due_s, self._finish, action.engine, request.sample_id, due_s)
            else:
                self._dispatcher.recalled(action.engine, [])

    def _finish(self, engine: str, sample_id: str, due_s: float) -> None:
        if self._loop.time() < self._ends_s:
            self.delays.append(self._loop.time() - due_s)
            self._dispatcher.finished(engine, {sample_id: 1000})
            self._submit(1)
            self._carry_out()

    def late(self) -> dict[str, float]:
        """Return how late samples were handled."""
        ordered = sorted(self.delays)
        return {
            "median_s": statistics.median(ordered),
            "p99_s": ordered[int(0.99 * len(ordered))],
            "max_s": ordered[-1],
        }


async def dispatch_alone(num_workers: int, seconds: float) -> dict[str, float]:
    dispatch = Dispatch(num_workers)
    await dispatch.run(seconds)
    return dispatch.late()


async def simulate(num_workers: int, max_leases: int, seconds: float) -> dict[str, Any]:
    leases = LeaseSettings(min_s=0.1, lease_s=60.0, stop_timeout_s=2.0, max_leases=max_leases)
    settings = CoordinatorSettings(leases, session_s=1.0, publish=True)
    coordinator = Coordinator(settings, Simulated)
    workers = [f"engine-{i}" for i in range(num_workers)]
    for worker in workers:
        coordinator.join(worker)
    coordinator.policy_changed(1, "policy")
    pauses: list[float] = []
    waits: list[float] = []
    ends_s = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < ends_s:
            before_s = time.monotonic()
            await asyncio.sleep(0)
            pauses.append(time.monotonic() - before_s)

    async def live(worker: str, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        while time.monotonic() < ends_s:
            coordinator.idle(worker, rng.uniform(0, 4))
            Simulated.events += 1
            await asyncio.sleep(rng.uniform(0.5, 4))
            asked_s = time.monotonic()
            await coordinator.needed(worker)
            Simulated.events += 1
            waits.append(time.monotonic() - asked_s)
            await asyncio.sleep(rng.uniform(0.5, 4))

    await asyncio.sleep(1.0)
    Simulated.events = 0
    started_s = time.monotonic()
    dispatch = Dispatch(num_workers)
    lives = (live(w, random.Random(w)) for w in workers)
    await asyncio.gather(dispatch.run(seconds), watch(), *lives)
    elapsed_s = time.monotonic() - started_s
    metrics = coordinator.metrics()
    await coordinator.shutdown()
    ordered = sorted(waits)
    return {
        "workers": num_workers,
        "events": Simulated.events,
        "events_per_s": Simulated.events / elapsed_s,
        "leases": metrics["leases"],
        "kills": metrics["kills"],
        "pause_max_s": max(pauses),
        "pause_p99_s": sorted(pauses)[int(0.99 * len(pauses))],
        "needed_to_free_median_s": statistics.median(ordered),
        "needed_to_free_p99_s": ordered[int(0.99 * len(ordered))],
        "needed_to_free_max_s": ordered[-1],
        "dispatches_per_s": len(dispatch.delays) / seconds,
        "dispatch_late": dispatch.late(),
    }


def measure(count: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Take turns between the three cases; return the repeat with the median delay of each."""
    every: list[dict[str, Any]] = []
    few: list[dict[str, float]] = []
    alone: list[dict[str, float]] = []
    for _ in range(repeats):
        every.append(asyncio.run(simulate(count, count, seconds)))
        few.append(asyncio.run(simulate(count, TltConfig().max_trainers, seconds))["dispatch_late"])
        alone.append(asyncio.run(dispatch_alone(count, seconds)))
    row = sorted(every, key=lambda found: found["dispatch_late"]["p99_s"])[repeats // 2]
    for name, late in (("few_leases", few), ("alone", alone)):
        row[f"dispatch_late_{name}"] = sorted(late, key=lambda one: one["p99_s"])[repeats // 2]
    return row | {
        "dispatch_late_p99_s": [
            [late["p99_s"] for late in case]
            for case in ([found["dispatch_late"] for found in every], few, alone)
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = [measure(count, options.seconds, options.repeats) for count in options.workers]
    RESULT.write_text(json.dumps({"provenance": provenance(), "rows": found}, indent=2) + "\n")
    for each in found:
        print(
            f"{each['workers']:5} workers: {each['events_per_s']:7.0f} events/s, longest pause "
            f"{1000 * each['pause_max_s']:.0f} ms, needed to free p99 "
            f"{1000 * each['needed_to_free_p99_s']:.0f} ms, dispatch late p99 "
            f"{1000 * each['dispatch_late']['p99_s']:.0f} ms "
            f"({1000 * each['dispatch_late_few_leases']['p99_s']:.0f} ms with few leases, "
            f"{1000 * each['dispatch_late_alone']['p99_s']:.0f} ms alone)"
        )


if __name__ == "__main__":
    main()
