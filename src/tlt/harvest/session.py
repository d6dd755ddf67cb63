"""Harvest as the training loop sees it: engines' idleness goes to the coordinator, what was learned
goes into the engines.

Whatever happens here, the run goes on. The coordinator owns its trainers: when it dies, Ray ends
them, and another one starts with a higher epoch, which nothing of the old one can speak for. A call
that does not come back in time ends the coordinator, and after too many of those harvest is off for
the rest of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tlt.drafter.eagle3.config import Eagle3Config
from tlt.harvest.actor import CoordinatorActor, Packed, TrainerPlace, pack, trainer_name, unpack
from tlt.harvest.coordinator import CoordinatorSettings, Version
from tlt.harvest.forecast import TailForecast
from tlt.node.cluster import end_actors
from tlt.rollout.pool import RolloutPool, place_of

if TYPE_CHECKING:
    import torch

    from tlt.harvest.trainer import HarvestSettings
    from tlt.rollout.pool import NewWeights
    from tlt.spans import Span

logger = logging.getLogger(__name__)

Record = dict[str, float]

VERSION = "version.json"
MAX_RESTARTS = 3
ANSWER_S = 5.0
"""How long the coordinator may take to answer, besides stopping a trainer."""
SWAP_S = 60.0
"""Engines that have not taken a drafter after this time never will."""
PEEK_S = 1.0
POLL_S = 30.0
START_S = 60.0
"""How long a run waits for its trainers: loading them beside an engine at work would slow it."""
ALARM_DRAFTS = 200
ALARM_LENGTH = 1.1
"""A drafter that is accepted less than this over so many drafts in a step is of no use."""


class NoHarvest:
    """What a run without harvest does at the same places: nothing."""

    def ready(self, engine: str, report: Mapping[str, Any]) -> None: ...
    def idle(self, engine: str) -> None: ...
    async def needed(self, engine: str) -> None: ...
    def rollout_started(self, num_samples: int) -> None: ...
    def sample_finished(self) -> None: ...
    async def rollout_ended(self) -> None: ...
    def policy_changed(self, weights: NewWeights, version: int) -> None: ...
    def alarm(self, drafts: int, accepted: int) -> None: ...
    async def record(self) -> Record:
        return {}

    async def leased(self) -> list[str]:
        return []

    async def take_spans(self) -> dict[str, list[Span]]:
        return {}

    def save(self, folder: Path) -> None: ...
    def open(self) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Harvest(NoHarvest):
    """Tells the coordinator what engines do, and engines what it has learned. Never raises."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        spot: HarvestSettings,
        pool: RolloutPool,
        place: Callable[[str], Mapping[str, Any]],
        on_gpu: bool,
        colocated: bool = True,
        first_version: int = 0,
    ) -> None:
        self._settings = settings
        self._spot = spot
        self._pool = pool
        self._place = place
        self._on_gpu = on_gpu
        self._colocated = colocated
        self._run = f"{os.getpid()}"
        self._epoch = 0
        self._actor: Any = None
        self._off = False
        self._started = False
        self._engines: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The engine at every worker, and its cores."""
        self._turns: dict[str, int] = {}
        self._idle: dict[str, str] = {}
        """Workers that the coordinator may lease, and their engines."""
        self._freeing: dict[str, asyncio.Task[None]] = {}
        self._forecast = TailForecast()
        self._asleep: set[str] = set()
        """Engines whose memory is the trainers'."""
        self._published: tuple[int, dict[str, torch.Tensor] | None, Any]
        self._published = first_version, None, None
        """Version, weights, and these for other processes; None are those of the start."""
        self._policy: tuple[int, Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()
        self._rollout = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._before: Record = {}
        self._restarts = 0
        self._failures = 0
        """Coordinators lost since one of them last trained: what fails every time must end."""
        self._swap_s = 0.0
        self._alarms = 0
        self._release_max_s = 0.0

    # --- what the pool says -------------------------------------------------------------------

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """An engine is there: a trainer starts beside it."""
        worker, cores = place_of(engine), tuple(report.get("cores", ()))
        known = self._engines.get(worker)
        self._engines[worker] = engine, cores
        if self._started and (known is None or known[1] != cores):
            self._say("join", worker, self._place_of(worker))

    def _place_of(self, worker: str) -> TrainerPlace:
        engine, cores = self._engines[worker]
        return TrainerPlace(cores, self._on_gpu, dict(self._place(engine)))

    def idle(self, engine: str) -> None:
        """An engine has nothing to generate while others have."""
        worker, remaining_s = place_of(engine), self._forecast.remaining_s(time.monotonic())
        self._idle[worker] = engine
        turn = self._turn(worker)
        if self._on_gpu:
            self._task(self._sleep(engine, worker, turn, remaining_s))
        else:
            self._say("idle", worker, turn, remaining_s)

    async def _sleep(self, engine: str, worker: str, turn: int, remaining_s: float) -> None:
        """On a GPU the engine's memory is what the trainer needs."""
        self._asleep.add(engine)
        await self._pool.call_engine(engine, "sleep")
        self._say("idle", worker, turn, remaining_s)

    async def needed(self, engine: str, wake: bool = True) -> None:
        """An engine will generate again; returns when its device is free."""
        worker = place_of(engine)
        if self._idle.pop(worker, None) is not None:
            self._freeing[worker] = asyncio.create_task(self._free(worker))
        if (freeing := self._freeing.get(worker)) is not None:
            await asyncio.shield(freeing)
        if wake and engine in self._asleep:
            self._asleep.discard(engine)
            await self._pool.call_engine(engine, "wake")
            await self._pool.refresh_drafter(engine)

    async def _free(self, worker: str) -> None:
        try:
            await self._ask("needed", worker, self._turn(worker))
        except Exception:
            logger.exception("harvest could not give %s back as it should", worker)
        finally:
            self._freeing.pop(worker, None)

    def _turn(self, worker: str) -> int:
        self._turns[worker] = self._turns.get(worker, 0) + 1
        return self._turns[worker]

    # --- what the training loop says ----------------------------------------------------------

    def rollout_started(self, num_samples: int) -> None:
        self._forecast.started(num_samples, time.monotonic())
        self._rollout.set()

    def sample_finished(self) -> None:
        self._forecast.finished(1, time.monotonic())

    async def rollout_ended(self) -> None:
        """Every device back to the run, and no more new drafters until the next rollout.

        Engines on GPUs stay asleep if the learner is to have their memory next.
        """
        started_s = time.monotonic()
        self._forecast.ended()
        self._rollout.clear()
        engines = [*self._idle.values(), *self._asleep]
        await asyncio.gather(*(self.needed(e, wake=not self._colocated) for e in engines))
        await asyncio.gather(*(asyncio.shield(task) for task in self._freeing.values()))
        async with self._swapping:
            pass
        self._release_max_s = max(self._release_max_s, time.monotonic() - started_s)

    def policy_changed(self, weights: NewWeights, version: int) -> None:
        """Trainers need the new head and embedding, which drafts are judged by."""
        self._task(self._hand_on(weights, version))

    async def _hand_on(self, weights: NewWeights, version: int) -> None:
        try:
            self._policy = version, ray.put(await asyncio.to_thread(_packed_ends, weights))
        except Exception as error:
            logger.warning("the policy's head did not reach the trainers (%r)", error)
            return
        self._say("policy_changed", version, [self._policy[1]])

    async def record(self) -> Record:
        """What harvest did since the last call."""
        now = await self._ask("metrics")
        record = {
            "harvest/enabled": float(not self._off),
            "harvest/coordinator_restarts": self._restarts,
            "harvest/swap_s": self._swap_s,
            "harvest/release_s": self._release_max_s,
            "harvest/alarms": self._alarms,
        }
        self._restarts, self._swap_s, self._release_max_s, self._alarms = 0, 0.0, 0.0, 0
        if now is None:
            return record
        if now["trained_steps"]:
            self._failures = 0
        before, self._before = self._before, now
        if before.get("leases", 0) > now["leases"]:
            before = {}  # of a coordinator that died
        since = {name: now[name] - before.get(name, 0.0) for name in now}
        return record | {
            "harvest/idle_s": since["idle_s"],
            "harvest/coverable_s": since["coverable_s"],
            "harvest/used_s": since["used_s"],
            "harvest/trained_tokens": since["trained_tokens"],
            "harvest/published": since["published"],
            "harvest/refused": since["refused"],
            "harvest/merges": since["merges"],
            "harvest/faults": since["faults"],
            "harvest/trainer_restarts": since["trainer_restarts"],
            "harvest/kills": since["kills"],
            "harvest/stop_max_s": now["stop_max_s"],
            "harvest/loss": now["loss"],
            "harvest/held_out_length": now["length"],
        }

    async def leased(self) -> list[str]:
        """Workers that train now."""
        return await self._peek("leased") or []

    async def take_spans(self) -> dict[str, list[Span]]:
        """When every worker trained since the last call."""
        return await self._peek("take_spans") or {}

    def alarm(self, drafts: int, accepted: int) -> None:
        """A drafter that nothing is accepted from is a fault, even if speculation avoids it."""
        length = 1 + accepted / max(1, drafts)
        if drafts >= ALARM_DRAFTS and length < ALARM_LENGTH:
            self._alarms += 1
            logger.warning(
                "the drafter's acceptance length is %.2f: engines do without it until it is better",
                length,
            )

    def save(self, folder: Path) -> None:
        """The published drafter, as engines load it, for a resumed run. No drafter, no harm."""
        try:
            self._save(folder)
        except Exception as error:
            logger.warning("the drafter could not be written to %s (%r)", folder, error)

    def _save(self, folder: Path) -> None:
        import torch

        from tlt.drafter.checkpoint import load_drafter, save_drafter

        version, weights, _ = self._published
        drafter = load_drafter(Path(self._spot.drafter))
        if weights is not None:
            drafter.load_state_dict(weights)
        hidden = folder.with_name(f".{folder.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        save_drafter(drafter, hidden, getattr(torch, self._pool_dtype()))
        (hidden / VERSION).write_text(json.dumps({"version": version}))
        shutil.rmtree(folder, ignore_errors=True)
        hidden.rename(folder)

    def _pool_dtype(self) -> str:
        return str(self._drafter_config().get("dtype", "bfloat16"))

    def _drafter_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((Path(self._spot.drafter) / "config.json").read_text())
        return config

    # --- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the coordinator's process, while engines start."""
        self._start_coordinator()

    async def start(self) -> None:
        """Trainers beside all engines, which are running but have nothing to do yet."""
        self._started = True
        self._join_all()
        self._task(self._publish_versions())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while (found := await self._ask("metrics")) is not None:
                    if found["ready"] >= len(self._engines):
                        return
                    await asyncio.sleep(0.1)

    def _join_all(self) -> None:
        for worker in self._engines:
            self._say("join", worker, self._place_of(worker))

    def _start_coordinator(self) -> None:
        self._epoch += 1
        self._before = {}
        number, _, weights = self._published
        self._actor = (
            ray.remote(CoordinatorActor)
            .options(num_cpus=0, max_restarts=0, max_concurrency=1000)
            .remote(
                self._settings,
                self._spot,
                self._run,
                self._epoch,
                (number, [] if weights is None else [weights]),
            )
        )
        if self._started:
            self._join_all()
        if self._policy is not None:
            self._say("policy_changed", self._policy[0], [self._policy[1]])

    async def stop(self) -> None:
        actor, self._actor, self._off = self._actor, None, True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if actor is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ANSWER_S):
                    await actor.shutdown.remote()
            ray.kill(actor)

    # --- talking to the coordinator -----------------------------------------------------------

    def _say(self, method: str, *args: Any) -> None:
        """Without waiting for an answer; whether it arrived shows in what is asked later."""
        if not self._off and self._actor is not None:
            getattr(self._actor, method).remote(*args)

    async def _ask(self, method: str, *args: Any) -> Any:
        """An answer in time, or none and another coordinator."""
        async with self._restarting:  # until the trainers of the last one are gone
            actor = self._actor
        if self._off or actor is None:
            return None
        limit_s = self._settings.leases.stop_timeout_s + ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(actor, method).remote(*args)
        except (ray.exceptions.RayError, TimeoutError) as error:
            await self._restart(actor, error)
        return None

    async def _peek(self, method: str) -> Any:
        """An answer if there is one at once. Looking has no consequences."""
        if self._off or (actor := self._actor) is None:
            return None
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(PEEK_S):
                return await getattr(actor, method).remote()
        return None

    async def _restart(self, actor: Any, error: BaseException) -> None:
        """Whoever waits for it may give up; the restart goes on."""
        await asyncio.shield(self._task(self._replace_coordinator(actor, error)))

    async def _replace_coordinator(self, actor: Any, error: BaseException) -> None:
        """End a coordinator that is lost, and its trainers with it; start another."""
        async with self._restarting:
            if self._actor is not actor:
                return
            self._actor = None
            await self._end_all(actor)
            self._idle.clear()
            self._restarts += 1
            self._failures += 1
            if self._failures > MAX_RESTARTS:
                self._off = True
                logger.error(
                    "harvest is off for the rest of the run: %d coordinators were lost (%r)",
                    self._failures,
                    error,
                )
                return
            logger.warning("harvest's coordinator is lost (%r); another one starts", error)
            self._start_coordinator()

    async def _end_all(self, actor: Any) -> None:
        """Return only when no trainer is left that could use an engine's device."""
        doomed = [actor]
        for worker in self._engines:
            with contextlib.suppress(ValueError):
                doomed.append(ray.get_actor(trainer_name(self._run, self._epoch, worker)))
        await end_actors(doomed, ANSWER_S)

    async def _give_up(self, why: str) -> None:
        """Without harvest from here on, and nobody left on the engines' devices."""
        logger.error("harvest is off for the rest of the run: %s", why)
        async with self._restarting:
            actor, self._actor, self._off = self._actor, None, True
            if actor is not None:
                await self._end_all(actor)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- new drafters into the engines --------------------------------------------------------

    async def _publish_versions(self) -> None:
        """As they come, but only while engines generate: then nobody else touches weights."""
        while not self._off:
            actor = self._actor
            if actor is None:
                await asyncio.sleep(0.1)
                continue
            try:
                version = await actor.next_version.remote(POLL_S)
                if version is not None and actor is self._actor:
                    await self._swap(version)
            except ray.exceptions.RayError as error:
                await self._restart(actor, error)
            except Exception as error:
                await self._give_up(f"the engines do not take a new drafter ({error!r})")

    async def _swap(self, version: Version) -> None:
        """Hand a drafter to all engines, between two of their steps."""
        weights, tensors = await asyncio.to_thread(self._for_engines, await version.weights)
        while True:
            await self._rollout.wait()
            async with self._swapping:
                if not self._rollout.is_set():
                    continue  # it ended while we waited
                async with asyncio.timeout(SWAP_S):
                    seconds = await self._pool.update_drafter(
                        tensors.items(), version.number, skip=frozenset(self._asleep)
                    )
                break
        shared = await asyncio.to_thread(lambda: ray.put(pack(weights)))
        self._published = version.number, weights, shared
        self._swap_s += max(seconds, default=0.0)
        logger.info("drafter %d, accepting %.2f, is in use", version.number, version.length)

    def _for_engines(
        self, packed: Packed
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights, and as the engines load them."""
        import torch

        from tlt.drafter.checkpoint import drafter_weights

        weights = unpack(packed)
        config = Eagle3Config.from_hf(self._drafter_config())
        return weights, drafter_weights(weights, config, getattr(torch, self._pool_dtype()))


def _packed_ends(weights: NewWeights) -> Packed:
    """A policy's embedding and head."""
    from tlt.harvest.trainer import EMBEDDING, HEAD
    from tlt.node.weights import SharedWeights, read_weights

    tensors = read_weights(str(weights.path)) if isinstance(weights, SharedWeights) else weights
    return pack({name: tensor for name, tensor in tensors if name in (EMBEDDING, HEAD)})
