"""The engine as a Ray actor: one process, one engine, its own cores or GPUs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from tlt.config.rollout import EngineConfig
from tlt.contracts import Sample, SampleRequest
from tlt.errors import ConfigError, EngineError, EngineGone
from tlt.rollout.engine import RolloutEngine
from tlt.rollout.pool import Spawner
from tlt.rollout.vllm.core import PROCESS_ENVIRONMENT

if TYPE_CHECKING:
    import torch

    from tlt.node.fingerprint import Fingerprint

    Shipped = tuple[list[tuple[str, torch.Tensor]], tuple[int, dict[str, tuple[str, Fingerprint]]]]
    """Named tensors, and their seed and fingerprints on the sending node."""

POLL_S = 2.0
"""Seconds after which an engine with nothing to deliver shows that it is alive."""


class EngineActor:
    """An engine in its process. Ray runs these methods in threads of the actor."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self._engine = RolloutEngine(config, name)

    def start(self) -> dict[str, Any]:
        """Start the engine, and return its report with its process id and node."""
        from tlt.node.weights import remove_abandoned

        remove_abandoned()  # an engine of this node may have died while it loaded weights
        report = self._engine.start()
        return report | {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return getattr(self._engine, method)(*args)

    def call_with_weights(self, method: str, shipped: Shipped, version: int) -> Any:
        """Load weights that came from another node, through Ray's object store."""
        from tlt.node.weights import SharedWeights, read_fingerprints

        tensors, (seed, fingerprints) = shipped
        with SharedWeights(tensors, seed) as weights:
            if read_fingerprints(str(weights.path)) != (seed, fingerprints):
                raise EngineError("weights were damaged on their way from another node")
            return self.call(method, weights.manifest(), version)

    def take_finished(self) -> list[Sample]:
        """Return finished samples; an empty list after `POLL_S` without one."""
        return self._engine.take_finished(POLL_S)


_shipped: dict[str, Any] = {}
"""The latest weights in the object store, by the path of their file."""
_shipping = threading.Lock()
"""Held by the one thread that puts weights into the object store; those of others wait."""


def ship(path: str) -> Any:
    """Return a reference to weights in the object store, which every other node fetches once."""
    from tlt.node.weights import read_fingerprints, read_weights

    with _shipping:
        if path not in _shipped:
            if len(_shipped) > 1:  # keep two: the latest policy and the latest drafter
                _shipped.pop(next(iter(_shipped)))
            tensors = [(name, tensor.clone()) for name, tensor in read_weights(path)]
            _shipped[path] = ray.put((tensors, read_fingerprints(path)))
        return _shipped[path]


class RayEngine:
    """The pool's handle on an engine actor."""

    def __init__(
        self, config: EngineConfig, name: str, place: Mapping[str, Any] | None = None
    ) -> None:
        environment = {k: os.environ.get(k, v) for k, v in PROCESS_ENVIRONMENT.items()}
        if config.num_gpus == 0:
            environment["OMP_NUM_THREADS"] = str(config.num_cores)
        self.is_remote = False
        """Whether the engine is on another node than this process; known once it has started."""
        self._actor = (
            ray.remote(EngineActor)
            .options(
                num_cpus=config.num_cores if config.num_gpus == 0 else 1,
                num_gpus=config.num_gpus,
                max_concurrency=8,
                max_restarts=0,  # the pool starts successors itself, with the current weights
                runtime_env={"env_vars": environment},
                **(place or {}),
            )
            .remote(config, name)
        )

    async def start(self) -> dict[str, Any]:
        report: dict[str, Any] = await self._await(self._actor.start.remote())
        self.pid = report["pid"]
        self.is_remote = report["node"] != ray.get_runtime_context().get_node_id()
        return report

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        await self._await(self._actor.call.remote("submit", list(requests)))

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        return await self._await(self._actor.call.remote("withdraw", list(sample_ids)))

    async def take_finished(self) -> list[Sample]:
        return await self._await(self._actor.take_finished.remote())

    async def call(self, method: str, *args: Any) -> Any:
        if method in ("update_policy", "update_drafter") and self.is_remote:
            manifest, version = args
            tensors = await asyncio.to_thread(ship, manifest["path"])
            return await self._await(self._actor.call_with_weights.remote(method, tensors, version))
        return await self._await(self._actor.call.remote(method, *args))

    async def stop(self, graceful: bool) -> None:
        if graceful:
            try:
                async with asyncio.timeout(10):
                    await self.call("shutdown")
            except (EngineError, TimeoutError):
                pass
        ray.kill(self._actor)

    async def _await(self, ref: Any) -> Any:
        try:
            return await ref
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ConfigError | EngineError):
                raise type(cause)(str(cause)) from cause
            raise EngineError(str(error)) from error
        except ray.exceptions.RayActorError as error:
            raise EngineGone("the engine's process is gone") from error


def ray_spawner(
    config: EngineConfig, place: Callable[[str], Mapping[str, Any]] = lambda name: {}
) -> Spawner:
    """Return a spawner of engines, each a Ray actor. Refuse bad settings before any engine starts.

    `place` returns the options that put the actor of the engine of this name in its place.
    """
    from tlt.rollout.vllm.args import engine_args

    engine_args(config)
    return lambda name: RayEngine(config, name, place(name))
