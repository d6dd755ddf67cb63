"""The engine as a Ray actor: one process, one engine, its own cores or GPUs."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, cast

import ray

from tlt.config.rollout import EngineConfig
from tlt.errors import ConfigError, EngineError, EngineGone
from tlt.logs import LogSettings
from tlt.node.cluster import end_with_ray
from tlt.node.shared import run_environment
from tlt.rollout.client import Engine, EngineProcess, Spawner
from tlt.rollout.engine import RolloutEngine
from tlt.vllm.core import PROCESS_ENVIRONMENT
from tlt.vllm.environment import log_engine, log_environment

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class EngineActor(RolloutEngine):
    """An engine in its process. Ray runs its methods in threads of the actor."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        end_with_ray()
        log_engine()
        super().__init__(config, name)

    def start(self) -> dict[str, Any]:
        """Start the engine, and return its report with its process id and node."""
        report = super().start()
        logger.info("%s is ready, process %d", self.name, os.getpid())
        return report | {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def load_shipped(self, raw: Any, version: int, draft: bool) -> float:
        """Load weights that came from another node, through Ray's object store."""
        from tlt.node.weights import SharedWeights

        try:
            weights = SharedWeights.of_bytes(raw)
        except ValueError as error:
            raise EngineError(str(error)) from error
        with weights:
            load = self.update_drafter if draft else self.update_policy
            return load(weights.manifest(), version)


_shipped: dict[str, Any] = {}
"""The latest weights in the object store, by the path of their file."""
_shipping = threading.Lock()
"""Held by the thread that puts weights into the object store; other threads wait."""


def ship(path: str) -> Any:
    """Return a reference to weights in the object store, which every other node fetches once."""
    from tlt.node.weights import file_bytes

    with _shipping:
        if path not in _shipped:
            if len(_shipped) > 1:  # keep two: the latest policy and the latest drafter
                _shipped.pop(next(iter(_shipped)))
            _shipped[path] = ray.put(file_bytes(path))
        return _shipped[path]


class RayEngine:
    """The pool's handle on an engine actor."""

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        place: Mapping[str, Any] | None = None,
        log: LogSettings | None = None,
    ) -> None:
        environment = {k: os.environ.get(k, v) for k, v in PROCESS_ENVIRONMENT.items()}
        environment |= run_environment() | log_environment(log, name)
        if config.num_gpus == 0:
            environment["OMP_NUM_THREADS"] = str(config.num_cores)
        self.num_gpus = config.num_gpus
        self.is_remote = False
        """Whether the engine is on another node than this process; known once it has started."""
        self.actor = (
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
        report: dict[str, Any] = await self._await(self.actor.start.remote())
        self.pid = report["pid"]
        self.is_remote = report["node"] != ray.get_runtime_context().get_node_id()
        return report

    async def call(
        self, command: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self.is_remote and command in (Engine.update_policy, Engine.update_drafter):
            manifest, version = cast(tuple[dict[str, Any], int], args)
            raw = await asyncio.to_thread(ship, manifest["path"])
            draft = command == Engine.update_drafter
            return await self._await(self.actor.load_shipped.remote(raw, version, draft))
        return await self._await(getattr(self.actor, command.__name__).remote(*args, **kwargs))

    async def stop(self, graceful: bool) -> None:
        if graceful:
            try:
                async with asyncio.timeout(10):
                    await self.call(Engine.shutdown)
            except (EngineError, TimeoutError):
                pass
        ray.kill(self.actor)

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


@dataclass(frozen=True)
class PolicyRoute:
    """Engines that a learner sends its policy to, from GPU to GPU. The driver makes it."""

    backend: str
    """`ipc` or `nccl`, see `tlt.vllm.send`."""
    engines: tuple[str, ...]
    actors: tuple[Any, ...] = field(compare=False)
    num_workers: tuple[int, ...] = field(compare=False)
    """GPUs of each engine."""

    def open(self, rank: int, host: str, shapes: Any, dtype: Any, weights: Any) -> Any:
        """Connect a learner rank, in its process, and return its `PolicySender`."""
        from tlt.vllm.send import PolicySender

        return PolicySender(self.backend, rank, host, self, shapes, dtype, weights)

    def connect(self, init_infos: Sequence[dict[str, Any]]) -> None:
        """Connect each engine with its own settings."""
        self._each(Engine.connect_policy, [(info,) for info in init_infos])

    def start(self, shapes: list[tuple[str, list[int]]]) -> None:
        """Let all engines begin to load a policy."""
        self._each(Engine.start_policy, [(shapes,)] * len(self.actors))

    def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let all engines load one chunk of the policy."""
        self._each(Engine.receive_policy, [(update_info,)] * len(self.actors))

    def finish(self, version: int, seed: int, fingerprints: dict[str, Any]) -> None:
        """Let all engines compare what they loaded with the learner's policy."""
        args = [(version, seed, fingerprints)] * len(self.actors)
        errors = self._failed(Engine.finish_policy, args)
        if len(errors) == len(self.actors):
            raise next(iter(errors.values()))
        for name, error in errors.items():
            # It ends by itself, and the pool replaces it. The weights may still be right.
            logger.warning("%s did not take the policy that was sent: %r", name, error)

    def _each(self, command: Callable[[Engine, *Ts], object], args: Sequence[tuple[*Ts]]) -> None:
        """Call each engine with its own arguments, and raise the first error."""
        for error in self._failed(command, args).values():
            raise error

    def _failed(
        self, command: Callable[[Engine, *Ts], object], args: Sequence[tuple[*Ts]]
    ) -> dict[str, Exception]:
        """Call each engine with its own arguments, wait for all, and return their errors."""
        pairs = zip(self.actors, args, strict=True)
        refs = [getattr(actor, command.__name__).remote(*own) for actor, own in pairs]
        errors = ((name, _error(ref)) for name, ref in zip(self.engines, refs, strict=True))
        return {name: error for name, error in errors if error is not None}


def _error(ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return cast(Exception, error)
    return None


def policy_route(backend: str, processes: Mapping[str, EngineProcess]) -> PolicyRoute:
    """Return the route to engines that the pool holds."""
    engines = cast(Mapping[str, RayEngine], processes)
    return PolicyRoute(
        backend,
        tuple(engines),
        tuple(engine.actor for engine in engines.values()),
        tuple(engine.num_gpus for engine in engines.values()),
    )


def ray_spawner(
    config: EngineConfig,
    place: Callable[[str], Mapping[str, Any]] = lambda name: {},
    log: LogSettings | None = None,
) -> Spawner:
    """Return a spawner of engines, each a Ray actor. Refuse bad settings before any engine starts.

    `place` returns the options that put the actor of the engine of this name in its place.
    `log` says where engines log; None leaves logging unchanged.
    """
    from tlt.vllm.args import engine_args

    engine_args(config)
    return lambda name: RayEngine(config, name, place(name), log)
