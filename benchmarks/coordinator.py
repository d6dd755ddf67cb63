"""One coordinator and thousands of simulated workers: events a second, and the longest pause.

    python benchmarks/coordinator.py [--workers 4096] [--seconds 20]

The coordinator is the real one; its trainers answer after a few milliseconds instead of training.
Workers become idle and are needed again at random, all the time. An event is anything that the run
or a trainer tells the coordinator. A pause is how long its event loop did nothing else: what a
message would have waited. Writes benchmarks/results/coordinator.json.
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

from tlt.harvest.coordinator import Coordinator, CoordinatorSettings, Judged, Trained
from tlt.harvest.leases import LeaseSettings
from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "coordinator.json"
PASS_S = 0.03
"""How often a trainer looks whether to stop."""


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

    async def take(self, base: Any, published: Any, policy: Any) -> None:
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

    async def judge(self, lease: int) -> Judged | None:
        await self._answer()
        return Judged(random.random() < 0.3, 2.0, 2.0)

    async def merge(self, lease: int, others: list[tuple[Any, float]], own_weight: float) -> bool:
        await self._answer()
        return True

    async def export(self) -> int:
        await self._answer()
        return 0

    async def release(self) -> None:
        await self._answer()

    async def kill(self) -> None:
        self.stop.set()
        await self._answer()


async def simulate(num_workers: int, seconds: float) -> dict[str, Any]:
    settings = CoordinatorSettings(
        LeaseSettings(min_s=0.1, max_leases=num_workers), session_s=1.0, publish=True
    )
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
        turn = 0
        await asyncio.sleep(rng.uniform(0, 2))
        while time.monotonic() < ends_s:
            coordinator.idle(worker, turn := turn + 1, rng.uniform(0, 4))
            Simulated.events += 1
            await asyncio.sleep(rng.uniform(0.5, 4))
            asked_s = time.monotonic()
            await coordinator.needed(worker, turn := turn + 1)
            Simulated.events += 1
            waits.append(time.monotonic() - asked_s)
            await asyncio.sleep(rng.uniform(0.5, 4))

    await asyncio.sleep(1.0)
    Simulated.events = 0
    started_s = time.monotonic()
    await asyncio.gather(watch(), *(live(w, random.Random(w)) for w in workers))
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    found = [asyncio.run(simulate(count, options.seconds)) for count in options.workers]
    RESULT.write_text(json.dumps({"provenance": provenance(), "rows": found}, indent=2) + "\n")
    for each in found:
        print(
            f"{each['workers']:5} workers: {each['events_per_s']:7.0f} events/s, longest pause "
            f"{1000 * each['pause_max_s']:.0f} ms, needed to free p99 "
            f"{1000 * each['needed_to_free_p99_s']:.0f} ms"
        )


if __name__ == "__main__":
    main()
