"""Harvest on the engines of another framework, each of which is served by a Ray actor.

The framework says when a rollout begins and ends, and when it has loaded a policy. `ReplicaHarvest`
sees from the replicas' load which ones are idle, and lends them to TLT's harvest. It runs in a
separate thread, because the framework's trainer does not use asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file

from tlt.config.train import TltConfig
from tlt.errors import ConfigError
from tlt.harvest.actor import Packed, RayTrainer, TrainerPlace, pack, unpack
from tlt.harvest.coordinator import coordinator_settings
from tlt.harvest.published import version_of
from tlt.harvest.session import HarvestSession
from tlt.harvest.trainer import HarvestTrainerSettings
from tlt.node.shared import SharedFolder
from tlt.node.weights import SharedWeights
from tlt.vllm.environment import SWITCH_VARIABLE

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.2
"""Seconds between two checks of the replicas' load."""
HOOK_S = 120.0
"""Longest time that the framework waits for harvest, wherever it waits."""

Load = Callable[[], Awaitable[Sequence[int]]]
"""Returns the number of requests that each replica has."""


class ReplicaHarvest:
    """Harvest on the replicas of a framework. Its methods wait; after the start, none raises."""

    def __init__(
        self, tlt: TltConfig, trainer: HarvestTrainerSettings, servers: Sequence[Any], load: Load
    ) -> None:
        on_gpu = torch.cuda.is_available()
        first = version_of(Path(trainer.drafter))
        self._folder = SharedFolder.join(Path(trainer.buffer.folder))
        self._replicas = Replicas(servers, first)
        self._harvest = HarvestSession(
            coordinator_settings(tlt, publish=True),
            trainer,
            self._replicas,
            self._replicas.place,
            # To harvest, engines never sleep: a request of the framework may come at any time.
            on_gpu=False,
            first_version=first,
            spawn=_spawn_on_gpu if on_gpu else RayTrainer,
        )
        self._load = load
        self._polling: asyncio.Task[None] | None = None
        self._idle_s = 0.0
        self._num_policies = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="tlt-harvest", daemon=True).start()
        start = self._start(asdict(trainer.buffer))
        asyncio.run_coroutine_threadsafe(start, self._loop).result()

    # --- what the framework says --------------------------------------------------------------

    def rollout_started(self) -> None:
        """Watch the load of the replicas from now on, and lend idle ones to trainers."""
        self._wait(self._begin())

    def rollout_ended(self) -> None:
        """Return when no trainer works on any replica."""
        self._wait(self._end())

    def policy_changed(self) -> None:
        """Hand the policy that was loaded into the replicas to the trainers."""
        self._wait(self._hand_on())

    def record(self) -> dict[str, float]:
        """Return what harvest did since the last call."""
        return self._wait(self._record()) or {}

    def save(self, folder: Path) -> None:
        """Write the published drafter, with its optimizer."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._wait(self._harvest.save(folder, to_resume=True))

    def stop(self) -> None:
        """End all trainers, and free the memory of hidden states."""
        self._wait(self._harvest.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.remove()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run a piece of work in harvest's thread, and catch its exceptions."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(HOOK_S)
        except Exception:
            logger.exception("harvest failed; the run continues")
            return None

    # --- in harvest's thread ------------------------------------------------------------------

    async def _start(self, buffer: dict[str, Any]) -> None:
        await self._replicas.start(buffer)
        for engine in self._replicas.engines:
            self._harvest.ready(engine, {"cores": self._replicas.cores(engine)})
        await self._harvest.start()

    async def _begin(self) -> None:
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        watch = LoadWatch(self._harvest, self._replicas.engines, time.monotonic)
        try:
            while True:
                await watch.see(await self._load())
                await asyncio.sleep(POLL_S)
        except Exception:
            logger.exception("harvest no longer sees which replicas are idle; the run continues")
        finally:
            self._idle_s += watch.idle_s

    async def _end(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None
        await self._harvest.rollout_ended()

    async def _hand_on(self) -> None:
        self._num_policies += 1
        if embed_and_head := await self._replicas.embed_and_head():
            self._harvest.policy_changed(embed_and_head.items(), self._num_policies)

    async def _record(self) -> dict[str, float]:
        idle_s, self._idle_s = self._idle_s, 0.0
        return self._harvest.record() | {
            "tlt/drafter_version": float(self._replicas.version),
            "tlt/replica_idle_s": idle_s,
        }


class Listener(Protocol):
    """The part of `HarvestSession` that hears of the load."""

    def rollout_started(self, num_samples: int) -> None: ...
    def sample_finished(self) -> None: ...
    def idle(self, engine: str) -> None: ...
    async def needed(self, engine: str) -> None: ...


class LoadWatch:
    """Tells harvest which replicas are idle while others generate, and that samples end."""

    def __init__(
        self, harvest: Listener, engines: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._harvest = harvest
        self._engines = engines
        self._clock = clock
        self._most = self._left = 0
        """Largest number of requests so far, and the number left at the last look at the load."""
        self._idle: set[str] = set()
        self._seen_s = clock()
        self.idle_s = 0.0
        """Replica seconds without a request, while others had some."""

    async def see(self, load: Sequence[int]) -> None:
        """Compare the requests of each replica with the last time."""
        total, now_s = sum(load), self._clock()
        self.idle_s += len(self._idle) * (now_s - self._seen_s)
        self._seen_s = now_s
        if total > self._most:  # the framework still sends requests
            self._most = total
            self._harvest.rollout_started(total)
        else:
            for _ in range(self._left - total):
                self._harvest.sample_finished()
        self._left = total
        for engine, running in zip(self._engines, load, strict=True):
            if running and engine in self._idle:
                self._idle.discard(engine)
                await self._harvest.needed(engine)
            elif not running and total and engine not in self._idle:
                self._idle.add(engine)
                self._harvest.idle(engine)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a replica runs."""

    node: str
    gpus: str
    cores: tuple[int, ...]


class Replicas:
    """Replicas as harvest sees them: Ray actors with `collective_rpc`, as verl's servers are.

    verl's `collective_rpc` returns nothing, so answers come through `__ray_call__`.
    """

    def __init__(
        self, servers: Sequence[Any], version: int, share: Callable[[Packed], Any] = ray.put
    ) -> None:
        self._servers = {f"replica-{index}": server for index, server in enumerate(servers)}
        self._places: dict[str, Whereabouts] = {}
        self._policy_file = ""
        """File of the policy's embedding and head, on the node of the first replica."""
        self._share = share
        self.version = version
        """Version of the drafter in the replicas."""

    @property
    def engines(self) -> list[str]:
        return list(self._servers)

    async def start(self, buffer: dict[str, Any]) -> None:
        """Let all replicas store hidden states, and the first one share its policies."""
        for engine, server in self._servers.items():
            self._places[engine] = await _call(server, _whereabouts)
        self._policy_file = f"{buffer['folder']}-policy/embed_and_head.safetensors"
        try:
            for server in self._servers.values():
                await _rpc(server, "tlt_record", buffer)
            await _rpc(self._first, "tlt_share_embed_and_head", self._policy_file)
        except Exception as error:
            raise ConfigError(
                f"the replicas run without TLT ({error!r}); {SWITCH_VARIABLE} must name a drafter, "
                "and reach them: export it before Ray starts, or put it into the run's runtime_env"
            ) from error

    @property
    def _first(self) -> Any:
        return next(iter(self._servers.values()))

    def cores(self, engine: str) -> tuple[int, ...]:
        """Return the core of the trainer beside a replica, where there are no GPUs."""
        cores = self._places[engine].cores
        return (cores[self.engines.index(engine) % len(cores)],)

    def place(self, engine: str) -> Mapping[str, Any]:
        """Return the options of a trainer's actor beside a replica."""
        found = self._places[engine]
        node = NodeAffinitySchedulingStrategy(found.node, soft=False)
        gpu = {"gpu": found.gpus.split(",")[0]} if torch.cuda.is_available() else {}
        return {"scheduling_strategy": node, **gpu}

    async def embed_and_head(self) -> dict[str, torch.Tensor]:
        """Return embedding and head of the replicas' policy; nothing before the first one came."""
        return unpack(await _call(self._first, _read_file, self._policy_file))

    async def update_drafter(
        self,
        weights: SharedWeights | Iterable[tuple[str, torch.Tensor]],
        version: int,
        skip: Collection[str] = (),
    ) -> list[float]:
        """Load a drafter into all replicas; return the seconds of each."""
        assert not isinstance(weights, SharedWeights)
        tensors = dict(weights)
        packed = await asyncio.to_thread(lambda: self._share(pack(tensors)))
        seconds = await asyncio.gather(*(_swap(s, packed) for s in self._servers.values()))
        self.version = version
        return seconds

    async def sleep_engine(self, engine: str) -> None:
        raise NotImplementedError("harvest does not put the replicas of a framework to sleep")

    wake_engine = refresh_drafter = sleep_engine


def _spawn_on_gpu(settings: HarvestTrainerSettings, place: TrainerPlace) -> RayTrainer:
    return RayTrainer(settings, TrainerPlace(place.cores, True, place.options))


async def _rpc(server: Any, method: str, *args: Any) -> None:
    """Call a method of all workers of a replica's engine."""
    await server.collective_rpc.remote(method, args=args)


async def _call(server: Any, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a replica's process, with its actor as the first argument."""
    answer: T = await server.__ray_call__.remote(function, *args)
    return answer


async def _swap(server: Any, packed: Any) -> float:
    """Load a drafter into one replica, through a file in shared memory of its node."""
    started_s = time.monotonic()
    manifest = await _call(server, _hold_drafter, packed)
    try:
        await _rpc(server, "tlt_swap_drafter", manifest)
    finally:
        await _call(server, _drop_drafter)
    return time.monotonic() - started_s


# --- what runs in a replica's process; `server` is its actor --------------------------------------


def _whereabouts(server: Any) -> Whereabouts:
    return Whereabouts(
        node=ray.get_runtime_context().get_node_id(),
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


def _read_file(server: Any, file: str) -> Packed:
    return pack(load_file(file)) if Path(file).exists() else {}


def _hold_drafter(server: Any, packed: Packed) -> dict[str, Any]:
    server.tlt_drafter = SharedWeights(unpack(packed).items())
    manifest: dict[str, Any] = server.tlt_drafter.manifest()
    return manifest


def _drop_drafter(server: Any) -> None:
    server.tlt_drafter.close()
