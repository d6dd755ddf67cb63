"""Harvest in a run: the implementation of `contract.RunHarvest` that trains.

`HarvestSession` tells the coordinator which engines are idle, puts engines on GPUs to sleep and
wakes them, and hands published drafters to the engines. The run continues after any fault here: an
error inside harvest, a worker that does not come back in time, or a drafter that the engines refuse
turns harvest off for the rest of the run, with one log line. Its trainers are killed, and every
worker is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import ray

from tlt.harvest.actor import Packed, RayTrainer, TrainerPlace, pack, unpack
from tlt.harvest.contract import Engines, Record, RunHarvest, TrainerHandle, Version
from tlt.harvest.coordinator import ANSWER_S, Coordinator, CoordinatorSettings, now_s
from tlt.harvest.forecast import TailForecast
from tlt.harvest.published import EMBEDDING, HEAD, for_engines, save_published
from tlt.node.weights import SharedWeights, read_weights
from tlt.rollout.client import SWAP_S, place_of

if TYPE_CHECKING:
    import torch

    from tlt.harvest.trainer import HarvestTrainerSettings
    from tlt.rollout.weights import NewWeights
    from tlt.spans import Span

logger = logging.getLogger(__name__)

NUM_UPDATES = 5
"""Updates from which the duration of the next one is expected."""
OPTIMIZER_S = 10.0
"""Seconds that a checkpoint waits for the optimizer's state: a trainer may be at work."""
FETCH_S = 60.0
"""Seconds in which a published drafter must have come from the node of its trainer."""
START_S = 60.0
"""Seconds that a run waits for its trainers: loading them would slow engines at work."""
ALARM_DRAFTS = 200
ALARM_LENGTH = 1.1
"""Acceptance length below which a drafter is of no use, over `ALARM_DRAFTS` drafts of a step."""
STEP_TOTALS = (
    *("idle_s", "coverable_s", "used_s", "evaluated_s", "trained_tokens", "published"),
    *("refused", "merges", "faults", "trainer_restarts", "kills", "late_s"),
)
"""Totals of the coordinator whose growth in an RL step is recorded."""


@dataclass(eq=False, slots=True)
class IdlePeriod:
    """A time in which an engine is idle."""

    engine: str
    remaining_s: float


class HarvestSession(RunHarvest):
    """Tells the coordinator what engines do, and engines what the coordinator published. Never
    raises."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        trainer: HarvestTrainerSettings,
        pool: Engines,
        place: Callable[[str], Mapping[str, Any]],
        on_gpu: bool,
        colocated: bool = True,
        sleeps: bool | None = None,
        first_version: int = 0,
        spawn: Callable[[HarvestTrainerSettings, TrainerPlace], TrainerHandle] = RayTrainer,
        share: Callable[[Packed], Any] = ray.put,
    ) -> None:
        self._leases = settings.leases
        self._trainer = trainer
        self._start_folder = Path(trainer.drafter)
        """Folder of the drafter that the run began with."""
        self._pool = pool
        self._place = place
        self._on_gpu = on_gpu
        self._sleeps = on_gpu if sleeps is None else sleeps
        """Whether engines give their memory to trainers; emulated GPUs do so, too."""
        self._colocated = colocated
        self._spawn = spawn
        self._share = share
        self.coordinator = Coordinator(settings, self._spawn_trainer, first_version=first_version)
        self._started = False
        self.workers: dict[str, tuple[int, ...]] = {}
        """Workers with an engine, and their cores."""
        self._idle: dict[str, IdlePeriod] = {}
        """Workers that the coordinator may lease."""
        self._freeing: dict[str, asyncio.Task[None]] = {}
        self._forecast = TailForecast()
        self._update_s: deque[float] = deque(maxlen=NUM_UPDATES)
        """Durations of the last updates during which trainers could work."""
        self._update_since_s: float | None = None
        self._asleep: set[str] = set()
        """Sleeping engines, whose memory the trainers may use."""
        self._moving: dict[str, asyncio.Lock] = {}
        """Held while an engine falls asleep or wakes."""
        self._published: tuple[int, Mapping[str, torch.Tensor] | None] = first_version, None
        """Version and weights of the drafter that engines have, which a thread may be writing;
        without weights, the drafter that the run began with."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()
        self._rollout = asyncio.Event()
        self._before: Record = {}
        """The coordinator's totals at the last call of `record`."""
        self._swap_s = 0.0
        self._alarms = 0
        self._release_max_s = 0.0

    # --- what the pool says -------------------------------------------------------------------

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """Start a trainer beside a new engine."""
        worker, cores = place_of(engine), tuple(report.get("cores", ()))
        moved = self.workers.get(worker) != cores
        self.workers[worker] = cores
        if self._started and moved:
            self.coordinator.join(worker)

    def idle(self, engine: str, for_s: float = math.inf) -> None:
        """Note that an engine has nothing to generate while others have, or for `for_s` seconds."""
        self._leave_idle(engine, min(for_s, self._forecast.remaining_s(now_s())))

    def _leave_idle(self, engine: str, for_s: float) -> None:
        """Let the coordinator lease an engine's worker, probably for `for_s` seconds."""
        if not self.coordinator.enabled:
            return
        worker = place_of(engine)
        self._idle[worker] = period = IdlePeriod(engine, for_s)
        if self._sleeps or worker in self._freeing:
            self._task(self._make_idle(worker, period))
        else:
            self.coordinator.idle(worker, for_s)

    async def _make_idle(self, worker: str, period: IdlePeriod) -> None:
        """Let a worker be leased once it is free, and on a GPU once its engine's memory is free."""
        if (freeing := self._freeing.get(worker)) is not None:
            await asyncio.shield(freeing)
        if self._sleeps:
            async with self._moving.setdefault(period.engine, asyncio.Lock()):
                if self._idle.get(worker) is period:
                    self._asleep.add(period.engine)
                    await self._pool.sleep_engine(period.engine)
        if self._idle.get(worker) is period:  # not needed again meanwhile
            self.coordinator.idle(worker, period.remaining_s)

    async def needed(self, engine: str) -> None:
        """Call an engine's worker back; return when its device is free, and the engine awake."""
        await self._call_back(place_of(engine))
        if self._sleeps:
            # Every caller waits: the engine may just be falling asleep, or waking for another.
            async with self._moving.setdefault(engine, asyncio.Lock()):
                if engine in self._asleep:
                    await self._pool.wake_engine(engine)
                    self._asleep.discard(engine)
                    await self._pool.refresh_drafter(engine)

    async def _call_back(self, worker: str) -> None:
        """Call a worker back; return when its device is free."""
        if self._idle.pop(worker, None) is not None and worker not in self._freeing:
            self._freeing[worker] = asyncio.create_task(self._free(worker))
        if (freeing := self._freeing.get(worker)) is not None:
            await asyncio.shield(freeing)

    async def _free(self, worker: str) -> None:
        try:
            await self.coordinator.needed(worker)
        finally:
            self._freeing.pop(worker, None)

    # --- what the training loop says ----------------------------------------------------------

    def rollout_started(self, num_samples: int) -> None:
        self._forecast.started(num_samples, now_s())
        self._rollout.set()

    def rollout_grew(self, num_samples: int) -> None:
        self._forecast.grew(num_samples)

    def sample_finished(self) -> None:
        self._forecast.finished(1, now_s())

    async def rollout_ended(self) -> None:
        """Give every device back to the run, and publish no drafter until the next rollout.

        Engines that sleep wake for the next policy.
        """
        started_s = now_s()
        self._forecast.ended()
        self._rollout.clear()
        await self._give_back()
        async with self._swapping:
            pass
        self._release_max_s = max(self._release_max_s, now_s() - started_s)

    def update_started(self) -> None:
        """Let trainers work during the update if the learner has its own devices."""
        if self._colocated:
            return
        self._update_since_s = now_s()
        expected_s = median(self._update_s) if self._update_s else math.inf
        if not self.coordinator.enabled or expected_s < self._leases.min_s:
            return
        # A lost engine's successor may be starting on its device: its worker is not idle.
        for engine in self._pool.engines[: self._leases.max_leases]:
            self._leave_idle(engine, expected_s)

    async def update_ended(self) -> None:
        """Give every device back: the engines take the new policy next."""
        if self._update_since_s is None:
            return
        self._update_s.append(now_s() - self._update_since_s)
        self._update_since_s = None
        await self._give_back()

    async def _give_back(self) -> None:
        """Call all workers back."""
        await asyncio.gather(*(self._call_back(worker) for worker in {*self._idle, *self._freeing}))

    def policy_changed(self, weights: NewWeights, version: int) -> None:
        """Hand the new head and embedding to the trainers, which train and evaluate with them."""
        self._task(self._hand_on(weights, version))

    async def _hand_on(self, weights: NewWeights, version: int) -> None:
        try:
            packed = await asyncio.to_thread(_pack_embed_and_head, weights)
            self.coordinator.policy_changed(version, self._share(packed))
        except Exception as error:
            logger.warning("the policy's head did not reach the trainers (%r)", error)

    def record(self) -> Record:
        """Return what harvest did since the last call."""
        before, now = self._before, self.coordinator.metrics()
        record = {
            "harvest/enabled": float(self.coordinator.enabled),
            "harvest/swap_s": self._swap_s,
            "harvest/release_s": self._release_max_s,
            "harvest/alarms": self._alarms,
            **{f"harvest/{name}": now[name] - before.get(name, 0.0) for name in STEP_TOTALS},
            "harvest/evaluated_share": now["evaluated_s"] / max(now["used_s"], 1e-9),
            "harvest/stop_max_s": now["stop_max_s"],
            "harvest/loss": now["loss"],
            "harvest/held_out_length": now["length"],
        }
        self._before = now
        self._swap_s, self._release_max_s, self._alarms = 0.0, 0.0, 0
        return record

    def leased(self) -> list[str]:
        """Return the workers that train now."""
        return self.coordinator.leased()

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when every worker trained since the last call, in wall-clock time."""
        shift_s = time.time() - asyncio.get_running_loop().time()
        return {
            worker: [span.shifted(shift_s) for span in spans]
            for worker, spans in self.coordinator.take_spans().items()
        }

    def alarm(self, drafts: int, accepted: int) -> None:
        """Warn of a drafter whose drafts are rarely accepted, even if the strategy avoids it."""
        length = 1 + accepted / max(1, drafts)
        if drafts >= ALARM_DRAFTS and length < ALARM_LENGTH:
            self._alarms += 1
            logger.warning(
                "the drafter's acceptance length is %.2f: engines leave it out until it is better",
                length,
            )

    async def save(self, folder: Path, to_resume: bool) -> None:
        """Write the published drafter, as engines load it; only warn if that fails.

        With the optimizer's state if the drafter is `to_resume` from.
        """
        state = await self._optimizer_state() if to_resume else None
        try:
            await asyncio.to_thread(self._save, folder, state)
        except Exception as error:
            logger.warning("the drafter could not be written to %s (%r)", folder, error)

    async def _optimizer_state(self) -> Packed | None:
        """Return the optimizer's state; None if there is none, or it does not come in time."""
        try:
            async with asyncio.timeout(OPTIMIZER_S):
                state: Packed | None = await self.coordinator.optimizer_state()
                return state
        except Exception as error:
            logger.warning("the checkpoint lacks the state of the drafter's optimizer (%r)", error)
            return None

    def _save(self, folder: Path, packed: Packed | None) -> None:
        state = None if packed is None else unpack(packed)
        version, weights = self._published
        save_published(folder, self._start_folder, weights, version, state)

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start trainers beside all engines, before there is work."""
        self._started = True
        for worker in self.workers:
            self.coordinator.join(worker)
        self._task(self._publish_versions())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self.coordinator.enabled and self.coordinator.metrics()["ready"] < len(
                    self.workers
                ):
                    await asyncio.sleep(0.1)

    def _spawn_trainer(self, worker: str) -> TrainerHandle:
        cores, options = self.workers[worker], dict(self._place(worker))
        name = worker.replace("engine", "trainer")
        return self._spawn(self._trainer, TrainerPlace(cores, self._on_gpu, options, name))

    async def stop(self) -> None:
        await self.coordinator.shutdown()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- new drafters into the engines --------------------------------------------------------

    async def _publish_versions(self) -> None:
        """Publish drafters as they come, but only while engines generate."""
        while (version := await self.coordinator.next_version()) is not None:
            try:
                async with asyncio.timeout(FETCH_S):
                    packed: Packed = await version.weights.blob
            except Exception as error:
                logger.warning("drafter %d was lost with its trainer (%r)", version.number, error)
                self.coordinator.lost(version)
                continue
            try:
                await self._swap(version, packed)
            except Exception as error:
                self.coordinator.fail(error)

    async def _swap(self, version: Version, packed: Packed) -> None:
        """Hand a drafter to all engines, between two of their steps."""
        weights = await asyncio.to_thread(unpack, packed)
        tensors = await asyncio.to_thread(for_engines, weights, self._start_folder)
        shared = await asyncio.to_thread(lambda: self._share(pack(weights)))
        self.coordinator.arrived(version, shared)
        while True:
            await self._rollout.wait()
            async with self._swapping:
                if not self.coordinator.enabled:
                    return
                if not self._rollout.is_set():
                    continue  # it ended while we waited
                file = await asyncio.to_thread(SharedWeights, tensors.items())
                # Engines that are falling asleep or waking load it when awake.
                moving = {name for name, lock in self._moving.items() if lock.locked()}
                async with asyncio.timeout(SWAP_S + ANSWER_S):
                    seconds = await self._pool.update_drafter(
                        file, version.number, skip=self._asleep | moving
                    )
                self._published = version.number, weights
                break
        self._swap_s += max(seconds, default=0.0)
        logger.info("drafter %d, accepting %.2f, is in use", version.number, version.length)


def _pack_embed_and_head(weights: NewWeights) -> Packed:
    """Return a policy's embedding and head, packed."""
    tensors = read_weights(str(weights.path)) if isinstance(weights, SharedWeights) else weights
    return pack({name: tensor for name, tensor in tensors if name in (EMBEDDING, HEAD)})
