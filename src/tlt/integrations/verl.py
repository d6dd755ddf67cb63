"""TLT inside verl: its synchronous trainer, with a drafter that idle replicas train.

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=tlt ...

verl starts its replicas under `TLT_CONFIG`, which names a drafter. Each replica stores the hidden
states of its samples. A replica that has nothing left to generate is leased to a trainer beside it,
until verl has all samples of the RL step. A drafter that became better goes into all replicas. It
is saved with verl's checkpoints. A fault of harvest ends harvest, not the run.

Importing this module registers the trainer; `verl_plugin` imports it when verl needs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tlt.config.load import check
from tlt.config.train import CaptureConfig, TltConfig
from tlt.errors import ConfigError
from tlt.harvest.actor import Packed, RayTrainer, TrainerPlace, pack, unpack
from tlt.harvest.coordinator import coordinator_settings
from tlt.harvest.published import version_of
from tlt.harvest.session import Harvest
from tlt.harvest.trainer import HarvestSettings
from tlt.integrations.switch import EXAMPLE, read_settings
from tlt.integrations.training import buffer_settings, harvest_settings, new_drafter
from tlt.node.shared import SharedFolder
from tlt.node.weights import SharedWeights
from tlt.rollout.vllm.plugin import SWITCH_VARIABLE as VARIABLE

__all__ = ["PPOTrainerTLT", "new_drafter"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
FOLDER = "drafter"
"""Folder of the drafter in a checkpoint of verl."""
POLL_S = 0.2
"""Seconds between two looks at the load of the replicas."""
HOOK_S = 120.0
"""Seconds that verl waits for harvest at most, wherever it waits."""
EXTENSION = "tlt.integrations.verl_worker.WorkerExtension"
HOW = (
    f"export {EXAMPLE} before verl starts, and on a cluster put it into "
    "ray_kwargs.ray_init.runtime_env.env_vars"
)


@register_trainer("tlt")
class PPOTrainerTLT(PPOTrainerSync):
    """verl's synchronous trainer, and harvest on its idle replicas."""

    def __init__(self, config: DictConfig) -> None:
        settings = config.actor_rollout_ref.rollout
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl's replay buffer asks for this name
            settings.engine_kwargs.setdefault("vllm", {})
            settings.engine_kwargs.vllm.worker_extension_cls = EXTENSION
        super().__init__(config)
        self._tlt: ReplicaHarvest | None = None

    def on_init_end(self) -> None:
        self._tlt = ReplicaHarvest(self.config, self.llm_server_manager)
        super().on_init_end()
        self._tlt.policy_changed()

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        assert self._tlt is not None
        self._tlt.rollout_started()

    def on_sample_end(self) -> None:
        assert self._tlt is not None
        self._tlt.rollout_ended()
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        assert self._tlt is not None
        self._tlt.policy_changed()
        self._pending_sync_metrics = self._tlt.record()

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        assert self._tlt is not None
        step = f"global_step_{self.global_steps}"
        self._tlt.save(Path(self.config.trainer.default_local_dir) / step / FOLDER)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().fit(*args, **kwargs)
        finally:
            if self._tlt is not None:
                self._tlt.stop()


class ReplicaHarvest:
    """Harvest on verl's replicas, in a thread of its own. Its methods wait, and never raise."""

    def __init__(self, config: DictConfig, manager: Any) -> None:
        drafter = _drafter_folder()
        tlt = _section(TltConfig, config, "tlt")
        buffer = buffer_settings(_section(CaptureConfig, config, "capture"))
        rollout, on_gpu = config.actor_rollout_ref.rollout, torch.cuda.is_available()
        self._balancer = manager.global_load_balancer
        self._addresses: list[str] = manager.server_addresses
        self._replicas = Replicas(manager.server_handles)
        self._replicas.record(asdict(buffer), f"{buffer.folder}-ends")
        self._folder = SharedFolder.join(Path(buffer.folder))
        self._harvest = Harvest(
            coordinator_settings(tlt, publish=True),
            harvest_settings(
                drafter,
                config.actor_rollout_ref.model.path,
                buffer,
                tlt,
                rollout.temperature,
                rollout.seed,
                on_gpu,
            ),
            self._replicas,
            self._replicas.place,
            # Engines stay awake: a request of verl may come at any time.
            on_gpu=False,
            first_version=version_of(drafter),
            spawn=_spawn_on_gpu if on_gpu else RayTrainer,
        )
        self._replicas.version = version_of(drafter)
        self._num_policies = 0
        self._polling: asyncio.Task[None] | None = None
        self._idle_s = 0.0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="tlt-harvest", daemon=True).start()
        self._wait(self._start())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run a piece of work in harvest's thread, and contain what it raises."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(HOOK_S)
        except Exception:
            logger.exception("harvest failed; the run goes on")
            return None

    async def _start(self) -> None:
        for engine in self._replicas.engines:
            self._harvest.ready(engine, {"cores": self._replicas.cores[engine]})
        await self._harvest.start()

    # --- what verl's trainer says -------------------------------------------------------------

    def rollout_started(self) -> None:
        """Watch the load of the replicas from now on, and lend idle ones to trainers."""
        self._wait(self._begin())

    def rollout_ended(self) -> None:
        """Return when no trainer works on any replica."""
        self._wait(self._end())

    def policy_changed(self) -> None:
        """Hand the policy that verl has loaded into the replicas to the trainers."""
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

    # --- in harvest's thread ------------------------------------------------------------------

    async def _begin(self) -> None:
        self._polling = asyncio.create_task(self._poll())

    async def _end(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None
        await self._harvest.rollout_ended()

    async def _hand_on(self) -> None:
        self._num_policies += 1
        if ends := await self._replicas.ends():
            self._harvest.policy_changed(ends.items(), self._num_policies)

    async def _record(self) -> dict[str, float]:
        idle_s, self._idle_s = self._idle_s, 0.0
        found = self._harvest.record()
        return found | {
            "tlt/drafter_version": float(self._replicas.version),
            "tlt/replica_idle_s": idle_s,
        }

    async def _poll(self) -> None:
        """Tell harvest which replicas are idle while others generate, and how many samples end."""
        try:
            idle: set[str] = set()
            most = left = 0
            seen_s = time.monotonic()
            while True:
                status = await self._balancer.get_status.remote()
                load = [status["servers"].get(address, 0) for address in self._addresses]
                now_s, total = time.monotonic(), sum(load)
                if total > most:  # verl is still sending requests
                    most = left = total
                    self._harvest.rollout_started(most)
                for _ in range(left - total):
                    self._harvest.sample_finished()
                left = total
                self._idle_s += len(idle) * (now_s - seen_s)
                seen_s = now_s
                for engine, running in zip(self._replicas.engines, load, strict=True):
                    if running and engine in idle:
                        idle.discard(engine)
                        await self._harvest.needed(engine)
                    elif not running and total and engine not in idle:
                        idle.add(engine)
                        self._harvest.idle(engine)
                await asyncio.sleep(POLL_S)
        except Exception:
            logger.exception("harvest no longer sees which replicas are idle; the run goes on")


class Replicas:
    """verl's replicas as harvest sees them: Ray actors, each with an engine of vLLM."""

    def __init__(self, servers: list[Any]) -> None:
        self._servers = {f"replica-{index}": server for index, server in enumerate(servers)}
        places = ray.get([_call(server, _whereabouts) for server in servers])
        self._places = dict(zip(self._servers, places, strict=True))
        self.cores: dict[str, tuple[int, ...]] = {
            name: (cores[index % len(cores)],)
            for index, (name, (_, _, cores)) in enumerate(self._places.items())
        }
        """The core of each replica's trainer, where there are no GPUs."""
        self.version = 0
        """Version of the drafter in the replicas."""
        self._ends = ""

    @property
    def engines(self) -> list[str]:
        return list(self._servers)

    def place(self, engine: str) -> Mapping[str, Any]:
        """Return the options of a trainer's actor beside a replica."""
        node, gpus, _ = self._places[engine]
        options: dict[str, Any] = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)
        }
        return options | ({"gpu": gpus.split(",")[0]} if torch.cuda.is_available() else {})

    def record(self, buffer: dict[str, Any], ends: str) -> None:
        """Let all replicas store hidden states, and the first one the ends of its policies."""
        self._ends = ends
        first, *_ = self._servers.values()
        try:
            ray.get([self._rpc(server, "tlt_record", buffer) for server in self._servers.values()])
            ray.get(self._rpc(first, "tlt_share_ends", ends))
        except Exception as error:
            raise ConfigError(
                f"verl's replicas run without TLT, or without a drafter ({error!r}); {HOW}"
            ) from error

    async def ends(self) -> dict[str, torch.Tensor]:
        """Return the embedding and head of the policy in the replicas, by their names."""
        first, *_ = self._servers.values()
        packed: Packed = await _call(first, _read_ends, self._ends)
        return unpack(packed)

    async def call_engine(self, engine: str, method: str) -> None:
        raise NotImplementedError("verl alone puts its replicas to sleep")

    async def refresh_drafter(self, engine: str) -> None:
        raise NotImplementedError("verl alone puts its replicas to sleep")

    async def update_drafter(
        self,
        weights: SharedWeights | Iterable[tuple[str, torch.Tensor]],
        version: int,
        skip: Collection[str] = (),
    ) -> list[float]:
        """Load a drafter into all replicas; return the seconds of each."""
        assert not isinstance(weights, SharedWeights)
        packed = await asyncio.to_thread(lambda: ray.put(pack(dict(weights))))
        seconds = await asyncio.gather(
            *(self._swap(server, packed) for name, server in self._servers.items())
        )
        self.version = version
        return seconds

    async def _swap(self, server: Any, packed: Any) -> float:
        """Load a drafter into one replica, through a file in shared memory of its node."""
        started_s = time.monotonic()
        manifest = await _call(server, _hold_drafter, packed)
        try:
            await self._rpc(server, "tlt_swap_drafter", manifest)
        finally:
            await _call(server, _drop_drafter)
        return time.monotonic() - started_s

    @staticmethod
    def _rpc(server: Any, method: str, *args: Any) -> Any:
        return server.collective_rpc.remote(method, args=args)


# --- what runs in a replica's process; `server` is verl's `vLLMHttpServer` there ------------------


def _call(server: Any, function: Callable[..., Any], *args: Any) -> Any:
    return server.__ray_call__.remote(function, *args)


def _whereabouts(server: Any) -> tuple[str, str, list[int]]:
    """Return the node of a replica, its GPUs, and the cores that it may use."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ray.get_runtime_context().get_node_id(), gpus, sorted(os.sched_getaffinity(0))


def _read_ends(server: Any, folder: str) -> Packed:
    """Return what `WorkerExtension` wrote of the last policy; nothing if verl has loaded none."""
    from tlt.integrations.verl_worker import ENDS

    path = Path(folder) / ENDS
    return pack(load_file(path)) if path.exists() else {}


def _hold_drafter(server: Any, packed: Packed) -> dict[str, Any]:
    server.tlt_drafter = SharedWeights(unpack(packed).items())
    manifest: dict[str, Any] = server.tlt_drafter.manifest()
    return manifest


def _drop_drafter(server: Any) -> None:
    server.tlt_drafter.close()


# --- settings -------------------------------------------------------------------------------------


def _spawn_on_gpu(settings: HarvestSettings, place: TrainerPlace) -> RayTrainer:
    return RayTrainer(settings, TrainerPlace(place.cores, True, place.options))


def _drafter_folder() -> Path:
    """Return the drafter that `TLT_CONFIG` names; refuse a run that has none to train."""
    text = os.environ.get(VARIABLE, "")
    drafter = read_settings(text).drafter if text.strip() else None
    if drafter is None:
        raise ConfigError(
            f"trainer.v1.trainer_mode = 'tlt' trains a drafter, and {VARIABLE} names none; {HOW}"
        )
    return Path(drafter)


def _section(schema: type[T], config: DictConfig, name: str) -> T:
    """Return a section of TLT's settings, which verl's config may have: `+tlt.session_s=5`."""
    found = config.get(name)
    tree = {} if found is None else OmegaConf.to_container(found, resolve=True)
    return check(schema, tree, name)  # type: ignore[type-var]
