"""Harvest in a run: the implementation of `contract.RunHarvest` that trains.

`Harvest` tells the coordinator which engines are idle, and hands published drafters to the engines.
The coordinator is an object of this process. Whatever happens here, the run goes on: an exception
of the coordinator, or a worker that it does not give back in time, is logged and counted. Then its
trainers are killed, every worker is free, and another coordinator starts from the published
drafter. After `MAX_RESTARTS` losses without training in between, harvest is off for the rest of the
run.
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from tlt.harvest.actor import Packed, RayTrainer, TrainerPlace, pack, unpack
from tlt.harvest.contract import Engines, Record
from tlt.harvest.coordinator import Coordinator, CoordinatorSettings
from tlt.harvest.forecast import TailForecast
from tlt.harvest.published import PublishedDrafter, for_engines, save_published
from tlt.harvest.record import step_record
from tlt.harvest.rounds import TrainerHandle, Version, now_s
from tlt.rollout.client import SWAP_S
from tlt.rollout.client import place_of

if TYPE_CHECKING:
    import torch

    from tlt.harvest.trainer import HarvestSettings
    from tlt.rollout.weights import NewWeights
    from tlt.spans import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_UPDATES = 5
"""Updates from which the duration of the next one is expected."""
MAX_RESTARTS = 3
ANSWER_S = 5.0
"""Seconds that the coordinator may take to free a worker, besides stopping its trainer, and to end
its trainers."""
MOMENTS_S = 10.0
"""Seconds that a checkpoint waits for the optimizer's state: a trainer may be at work."""
POLL_S = 30.0
FETCH_S = 60.0
"""Seconds in which a published drafter must have come from the node of its trainer."""
START_S = 60.0
"""Seconds that a run waits for its trainers: loading them would slow engines at work."""
ALARM_DRAFTS = 200
ALARM_LENGTH = 1.1
"""Acceptance length below which a drafter is of no use, over `ALARM_DRAFTS` drafts of a step."""


class Harvest:
    """Tells the coordinator what engines do, and engines what it published. Never raises."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        trainer: HarvestSettings,
        pool: Engines,
        place: Callable[[str], Mapping[str, Any]],
        on_gpu: bool,
        colocated: bool = True,
        first_version: int = 0,
        spawn: Callable[[HarvestSettings, TrainerPlace], TrainerHandle] = RayTrainer,
        share: Callable[[Packed], Any] = ray.put,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._pool = pool
        self._place = place
        self._on_gpu = on_gpu
        self._colocated = colocated
        self._spawn = spawn
        self._share = share
        self._coordinator: Coordinator | None = None
        self._replacing: asyncio.Task[None] | None = None
        """Ends the trainers of a lost coordinator, and starts another."""
        self._off = False
        self._engines: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The engine at every worker, and its cores."""
        self._idle: dict[str, _Spell] = {}
        """Workers that the coordinator may lease."""
        self._freeing: dict[str, asyncio.Task[None]] = {}
        self._forecast = TailForecast()
        self._update_s: deque[float] = deque(maxlen=NUM_UPDATES)
        """Durations of the last updates during which trainers could work."""
        self._update_since_s: float | None = None
        self._asleep: set[str] = set()
        """Engines whose memory is the trainers'."""
        self._moving: dict[str, asyncio.Lock] = {}
        """Held while an engine falls asleep or wakes."""
        self._published = PublishedDrafter(first_version)
        self._policy: tuple[int, Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()
        self._rollout = asyncio.Event()
        self._before: Record = {}
        """The coordinator's totals at the last call of `record`."""
        self._restarts = 0
        self._failures = 0
        """Coordinators lost since one of them last trained: what fails every time must end."""
        self._swap_s = 0.0
        self._alarms = 0
        self._release_max_s = 0.0

    @property
    def enabled(self) -> bool:
        """Whether harvest is on: it goes off after too many failures."""
        return not self._off

    @property
    def workers(self) -> dict[str, tuple[int, ...]]:
        """Workers with an engine, and their cores."""
        return {worker: cores for worker, (_, cores) in self._engines.items()}

    def metrics(self) -> Record:
        """Return the coordinator's totals; empty while there is no coordinator."""
        return self._tell(Coordinator.metrics) or {}

    # --- what the pool says -------------------------------------------------------------------

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """Start a trainer beside a new engine."""
        worker, cores = place_of(engine), tuple(report.get("cores", ()))
        known = self._engines.get(worker)
        self._engines[worker] = engine, cores
        if known is None or known[1] != cores:
            self._tell(lambda coordinator: coordinator.join(worker))

    def idle(self, engine: str) -> None:
        """Note that an engine has nothing to generate while others have."""
        self._leave_idle(engine, self._forecast.remaining_s(now_s()))

    def _leave_idle(self, engine: str, for_s: float) -> None:
        """Let the coordinator lease an engine's worker, probably for `for_s` seconds."""
        worker = place_of(engine)
        spell = _Spell(engine, worker, for_s)
        self._idle[worker] = spell
        if self._on_gpu or worker in self._freeing:
            self._task(self._make_idle(spell))
        else:
            self._tell(lambda coordinator: coordinator.idle(worker, spell.remaining_s))

    async def _make_idle(self, spell: _Spell) -> None:
        """Let a worker be leased once it is free, and on a GPU once its engine's memory is free."""
        if (freeing := self._freeing.get(spell.worker)) is not None:
            await asyncio.shield(freeing)
        if self._on_gpu:
            async with self._moving.setdefault(spell.engine, asyncio.Lock()):
                if self._idle.get(spell.worker) is spell:
                    self._asleep.add(spell.engine)
                    await self._pool.sleep_engine(spell.engine)
        if self._idle.get(spell.worker) is spell:  # not needed again meanwhile
            self._tell(lambda coordinator: coordinator.idle(spell.worker, spell.remaining_s))

    async def needed(self, engine: str, wake: bool = True) -> None:
        """Call an engine's worker back; return when its device is free, and the engine awake."""
        worker = place_of(engine)
        if self._idle.pop(worker, None) is not None and worker not in self._freeing:
            self._freeing[worker] = asyncio.create_task(self._free(worker))
        if (freeing := self._freeing.get(worker)) is not None:
            await asyncio.shield(freeing)
        if wake and self._on_gpu:
            # Every caller waits: the engine may just be falling asleep, or waking for another one.
            async with self._moving.setdefault(engine, asyncio.Lock()):
                if engine in self._asleep:
                    await self._pool.wake_engine(engine)
                    self._asleep.discard(engine)
                    await self._pool.refresh_drafter(engine)

    async def _free(self, worker: str) -> None:
        """Free a worker within a limit: a coordinator that does not give it back is ended."""
        try:
            if (coordinator := self._coordinator) is not None:
                try:
                    async with asyncio.timeout(self._settings.leases.stop_timeout_s + ANSWER_S):
                        await coordinator.needed(worker)
                except Exception as error:
                    self._lose(coordinator, error)
            if self._replacing is not None:
                await asyncio.shield(self._replacing)
        finally:
            self._freeing.pop(worker, None)

    # --- what the training loop says ----------------------------------------------------------

    def rollout_started(self, num_samples: int) -> None:
        self._forecast.started(num_samples, now_s())
        self._rollout.set()

    def sample_finished(self) -> None:
        self._forecast.finished(1, now_s())

    async def rollout_ended(self) -> None:
        """Give every device back to the run, and publish no drafter until the next rollout.

        Engines on GPUs stay asleep if the learner needs their memory next.
        """
        started_s = now_s()
        self._forecast.ended()
        self._rollout.clear()
        await self._give_back()
        async with self._swapping:
            pass
        self._release_max_s = max(self._release_max_s, now_s() - started_s)

    def update_started(self) -> None:
        """Let trainers work during the update if the learner has devices of its own."""
        if self._colocated:
            return
        self._update_since_s = now_s()
        expected_s = median(self._update_s) if self._update_s else math.inf
        if self._off or expected_s < self._settings.leases.min_s:
            return
        # A lost engine's successor may be starting on its device: its worker is not idle.
        for engine in self._pool.engines[: self._settings.leases.max_leases]:
            self._leave_idle(engine, expected_s)

    async def update_ended(self) -> None:
        """Give every device back: the engines take the new policy next."""
        if self._update_since_s is None:
            return
        self._update_s.append(now_s() - self._update_since_s)
        self._update_since_s = None
        await self._give_back()

    async def _give_back(self) -> None:
        """Call all workers back, and wake their engines unless the learner comes next."""
        engines = [*(spell.engine for spell in self._idle.values()), *self._asleep]
        await asyncio.gather(*(self.needed(e, wake=not self._colocated) for e in engines))
        await asyncio.gather(*(asyncio.shield(task) for task in self._freeing.values()))

    def policy_changed(self, weights: NewWeights, version: int) -> None:
        """Hand the new head and embedding to the trainers, which train and evaluate with them."""
        self._task(self._hand_on(weights, version))

    async def _hand_on(self, weights: NewWeights, version: int) -> None:
        try:
            self._policy = version, self._share(await asyncio.to_thread(_packed_ends, weights))
        except Exception as error:
            logger.warning("the policy's head did not reach the trainers (%r)", error)
            return
        policy = self._policy
        self._tell(lambda coordinator: coordinator.policy_changed(*policy))

    def record(self) -> Record:
        """Return what harvest did since the last call."""
        now = self.metrics()
        record = {
            "harvest/enabled": float(not self._off),
            "harvest/coordinator_restarts": self._restarts,
            "harvest/swap_s": self._swap_s,
            "harvest/release_s": self._release_max_s,
            "harvest/alarms": self._alarms,
        }
        self._restarts, self._swap_s, self._release_max_s, self._alarms = 0, 0.0, 0.0, 0
        if not now:
            return record
        if now["trained_steps"]:
            self._failures = 0
        before, self._before = self._before, now
        return record | step_record(before, now)

    def leased(self) -> list[str]:
        """Return the workers that train now."""
        return self._tell(Coordinator.leased) or []

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when every worker trained since the last call, in wall-clock time."""
        shift_s = time.time() - asyncio.get_running_loop().time()
        return {
            worker: [span.shifted(shift_s) for span in spans]
            for worker, spans in (self._tell(Coordinator.take_spans) or {}).items()
        }

    def alarm(self, drafts: int, accepted: int) -> None:
        """Warn of a drafter whose drafts are hardly accepted, even if the strategy avoids it."""
        length = 1 + accepted / max(1, drafts)
        if drafts >= ALARM_DRAFTS and length < ALARM_LENGTH:
            self._alarms += 1
            logger.warning(
                "the drafter's acceptance length is %.2f: engines do without it until it is better",
                length,
            )

    async def save(self, folder: Path, to_resume: bool) -> None:
        """Write the published drafter, as engines load it; only warn if that fails.

        With the optimizer's state if the drafter is `to_resume` from.
        """
        moments = await self._moments() if to_resume else None
        try:
            await asyncio.to_thread(self._save, folder, moments)
        except Exception as error:
            logger.warning("the drafter could not be written to %s (%r)", folder, error)

    async def _moments(self) -> Packed | None:
        """Return the optimizer's state; None if there is none, or it does not come in time."""
        if (coordinator := self._coordinator) is None:
            return None
        try:
            async with asyncio.timeout(MOMENTS_S):
                moments: Packed | None = await coordinator.moments()
                return moments
        except Exception as error:
            logger.warning("the checkpoint lacks the state of the drafter's optimizer (%r)", error)
            return None

    def _save(self, folder: Path, moments: Packed | None) -> None:
        drafter = self._published
        state = None if moments is None else unpack(moments)
        save_published(folder, self._start_folder, drafter.weights, drafter.version, state)

    @property
    def _start_folder(self) -> Path:
        """Folder of the drafter that the run began with."""
        return Path(self._trainer.drafter)

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the coordinator, and trainers beside all engines, which have nothing to do yet."""
        self._start_coordinator()
        self._task(self._publish_versions())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while (found := self.metrics()) and found["ready"] < len(self._engines):
                    await asyncio.sleep(0.1)

    def _start_coordinator(self) -> None:
        self._coordinator = Coordinator(self._settings, self._spawn_trainer, self._failed)
        self._before = {}
        drafter = self._published
        self._tell(lambda coordinator: coordinator.start_from(drafter.version, drafter.shared))
        for worker in self._engines:
            self._tell(partial(Coordinator.join, worker=worker))
        if (policy := self._policy) is not None:
            self._tell(lambda coordinator: coordinator.policy_changed(*policy))

    def _spawn_trainer(self, worker: str) -> TrainerHandle:
        engine, cores = self._engines[worker]
        name = worker.replace("engine", "trainer")
        place = TrainerPlace(cores, self._on_gpu, dict(self._place(engine)), name)
        return self._spawn(self._trainer, place)

    async def stop(self) -> None:
        coordinator, self._coordinator, self._off = self._coordinator, None, True
        if self._replacing is not None:
            await asyncio.shield(self._replacing)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if coordinator is not None:
            await _shut_down(coordinator)

    # --- a coordinator that fails -------------------------------------------------------------

    def _tell(self, call: Callable[[Coordinator], T]) -> T | None:
        """Call the coordinator, if there is one, and contain what it raises."""
        if (coordinator := self._coordinator) is not None:
            try:
                return call(coordinator)
            except Exception as error:
                self._lose(coordinator, error)
        return None

    def _failed(self, error: BaseException) -> None:
        """Contain the failure of a task or timer of the current coordinator."""
        if self._coordinator is not None:
            self._lose(self._coordinator, error)

    def _lose(self, coordinator: Coordinator, error: BaseException) -> None:
        """End a coordinator that failed, and start another unless too many were lost."""
        if coordinator is not self._coordinator:
            return  # lost already, or the run ends
        self._restarts += 1
        self._failures += 1
        again = self._failures <= MAX_RESTARTS
        what = (
            "harvest's coordinator is lost; another one starts"
            if again
            else f"harvest is off for the rest of the run: {self._failures} coordinators were lost"
        )
        logger.error(what, exc_info=error)
        self._replace(coordinator, again)

    def _replace(self, coordinator: Coordinator, again: bool) -> None:
        self._coordinator, self._off = None, not again
        self._replacing = self._task(self._end(coordinator))
        if again:
            self._task(self._start_after(self._replacing))

    async def _end(self, coordinator: Coordinator) -> None:
        """End a coordinator: afterwards no trainer is left on an engine's device."""
        await _shut_down(coordinator)
        self._idle.clear()
        self._replacing = None

    async def _start_after(self, ending: asyncio.Task[None]) -> None:
        """Start another coordinator from the drafter that engines have, or are just loading."""
        await asyncio.shield(ending)
        async with self._swapping:
            if not self._off and self._coordinator is None:
                self._start_coordinator()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- new drafters into the engines --------------------------------------------------------

    async def _publish_versions(self) -> None:
        """Publish drafters as they come, but only while engines generate."""
        while not self._off:
            if (coordinator := self._coordinator) is None:
                await asyncio.sleep(0.1)
                continue
            try:
                version = await coordinator.next_version(POLL_S)
                async with asyncio.timeout(FETCH_S):
                    packed = None if version is None else await version.weights.blob
            except Exception as error:
                self._lose(coordinator, error)
                continue
            if version is None or packed is None:
                continue
            try:
                await self._swap(coordinator, version, packed)
            except Exception as error:
                logger.error(
                    "harvest is off for the rest of the run: the engines do not take a new drafter",
                    exc_info=error,
                )
                self._off = True
                if self._coordinator is not None:
                    self._replace(self._coordinator, again=False)

    async def _swap(self, coordinator: Coordinator, version: Version, packed: Packed) -> None:
        """Hand a drafter to all engines, between two of their steps.

        A coordinator that was lost meanwhile publishes nothing: its successor counts on that.
        """
        weights, tensors = await asyncio.to_thread(_unpacked, packed, self._start_folder)
        shared = await asyncio.to_thread(lambda: self._share(pack(weights)))
        while True:
            await self._rollout.wait()
            async with self._swapping:
                if coordinator is not self._coordinator:
                    return
                if not self._rollout.is_set():
                    continue  # it ended while we waited
                async with asyncio.timeout(SWAP_S + ANSWER_S):
                    seconds = await self._pool.update_drafter(
                        tensors.items(), version.number, skip=frozenset(self._asleep)
                    )
                # A coordinator that is lost from here on has a successor that starts from it.
                self._published = PublishedDrafter(version.number, weights, shared)
                break
        self._swap_s += max(seconds, default=0.0)
        logger.info("drafter %d, accepting %.2f, is in use", version.number, version.length)


@dataclass(eq=False, slots=True)
class _Spell:
    """A time in which an engine is idle."""

    engine: str
    worker: str
    remaining_s: float


def _unpacked(
    packed: Packed, start: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a drafter's weights, and the weights as engines load them."""
    weights = unpack(packed)
    return weights, for_engines(weights, start)


async def _shut_down(coordinator: Coordinator) -> None:
    """End a coordinator and its trainers within a limit, whatever state it is in."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await coordinator.shutdown()
    except Exception:
        logger.exception("harvest's trainers did not end as they should")


def _packed_ends(weights: NewWeights) -> Packed:
    """Return a policy's embedding and head, packed."""
    from tlt.harvest.trainer import EMBEDDING, HEAD
    from tlt.node.weights import SharedWeights, read_weights

    tensors = read_weights(str(weights.path)) if isinstance(weights, SharedWeights) else weights
    return pack({name: tensor for name, tensor in tensors if name in (EMBEDDING, HEAD)})
