"""Harvest's processes on Ray: a trainer beside every engine, and the coordinator that owns them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray

from tlt.hardware import thread_environment
from tlt.harvest.coordinator import (
    Coordinator,
    CoordinatorSettings,
    Judged,
    Trained,
    TrainerGone,
    Version,
)
from tlt.node.cluster import end_actors
from tlt.node.cores import bind_process

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tlt.harvest.trainer import HarvestSettings
    from tlt.spans import Span

Packed = dict[str, tuple[str, "np.ndarray[Any, Any]"]]
"""Tensors as Ray hands them on without copying: dtype and bytes."""


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    import torch

    packed = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        packed[name] = (
            str(flat.dtype).removeprefix("torch."),
            flat.view(torch.uint8 if flat.dim() else flat.dtype).numpy(),
        )
    return packed


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    import torch

    return {
        name: torch.tensor(array).view(getattr(torch, dtype))
        for name, (dtype, array) in packed.items()
    }


# --- the trainer's process ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Where the trainer beside an engine runs."""

    cores: tuple[int, ...]
    on_gpu: bool
    options: dict[str, Any]
    """Of its actor."""


class TrainerActor:
    """`end` and `export` come in threads of their own, so that they need not wait for training."""

    def __init__(self, settings: HarvestSettings, cores: tuple[int, ...], on_gpu: bool) -> None:
        os.nice(19)  # the run comes first, also where they should meet
        if not on_gpu:
            bind_process(cores)
        import torch

        from tlt.harvest.trainer import HarvestTrainer

        torch.set_num_threads(max(1, len(cores)))
        self._trainer = HarvestTrainer(settings, torch.device("cuda" if on_gpu else "cpu"))

    def pid(self) -> int:
        return os.getpid()

    def begin(self, lease: int, seconds: float) -> bool:
        return self._trainer.begin(lease, seconds)

    def end(self, lease: int) -> None:
        self._trainer.end(lease)

    def take(
        self,
        base: Packed | Literal["start"] | None,
        published: Packed | None,
        policy: Packed | None,
    ) -> None:
        self._trainer.take(
            unpack(base) if isinstance(base, dict) else base,
            None if published is None else unpack(published),
            None if policy is None else unpack(policy),
        )

    def train(self, lease: int, seconds: float) -> Trained:
        return self._trainer.train(lease, seconds)

    def judge(self, lease: int) -> Judged | None:
        return self._trainer.judge(lease)

    def merge(self, lease: int, own_weight: float, shares: list[float], *others: Packed) -> bool:
        members = [(unpack(o), share) for o, share in zip(others, shares, strict=True)]
        return self._trainer.merge(lease, members, own_weight)

    def export(self) -> Packed:
        return pack(self._trainer.export())

    def release(self) -> None:
        self._trainer.release()


class RayTrainer:
    """The coordinator's handle on a trainer. Weights travel as references into Ray's store."""

    def __init__(self, settings: HarvestSettings, place: TrainerPlace, name: str) -> None:
        environment = thread_environment() | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, len(place.cores))),
        }
        options = dict(place.options)
        if (gpu := options.pop("gpu", None)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        actor = ray.remote(concurrency_groups={"control": 2})(TrainerActor)
        self._actor = actor.options(
            name=name,
            num_cpus=0,
            max_restarts=0,
            runtime_env={"env_vars": environment},
            **options,
        ).remote(settings, place.cores, place.on_gpu)

    async def start(self) -> None:
        await self._await(self._actor.pid.remote())

    async def begin(self, lease: int, seconds: float) -> bool:
        return bool(await self._await(self._actor.begin.remote(lease, seconds)))

    async def end(self, lease: int) -> None:
        await self._await(self._actor.end.options(concurrency_group="control").remote(lease))

    async def take(self, base: Any, published: Any, policy: Any) -> None:
        await self._await(self._actor.take.remote(base, published, policy))

    async def train(self, lease: int, seconds: float) -> Trained:
        trained: Trained = await self._await(self._actor.train.remote(lease, seconds))
        return trained

    async def judge(self, lease: int) -> Judged | None:
        judged: Judged | None = await self._await(self._actor.judge.remote(lease))
        return judged

    async def merge(self, lease: int, others: list[tuple[Any, float]], own_weight: float) -> bool:
        weights, shares = [w for w, _ in others], [share for _, share in others]
        call = self._actor.merge.remote(lease, own_weight, shares, *weights)
        return bool(await self._await(call))

    async def export(self) -> Any:
        weights = self._actor.export.options(concurrency_group="control").remote()
        await self._await(weights)
        return weights

    async def release(self) -> None:
        await self._await(self._actor.release.remote())

    async def kill(self) -> None:
        await end_actors([self._actor])

    async def _await(self, call: Any) -> Any:
        try:
            return await call
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            raise TrainerGone("the trainer's process is gone") from error


# --- the coordinator's process --------------------------------------------------------------------


def trainer_name(run: str, epoch: int, worker: str) -> str:
    return f"tlt-trainer-{run}-{epoch}-{worker}"


class CoordinatorActor:
    """All methods are coroutines of one event loop: none waits for another."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        spot: HarvestSettings,
        run: str,
        epoch: int,
        published: tuple[int, list[Any]],
    ) -> None:
        self._places: dict[str, TrainerPlace] = {}
        self._coordinator = Coordinator(
            settings,
            lambda worker: RayTrainer(spot, self._places[worker], trainer_name(run, epoch, worker)),
            epoch,
        )
        number, weights = published
        self._coordinator.start_from(number, weights[0] if weights else None)

    async def pid(self) -> int:
        return os.getpid()

    async def join(self, worker: str, place: TrainerPlace) -> None:
        self._places[worker] = place
        self._coordinator.join(worker)

    async def idle(self, worker: str, turn: int, for_s: float) -> None:
        self._coordinator.idle(worker, turn, for_s)

    async def needed(self, worker: str, turn: int) -> None:
        await self._coordinator.needed(worker, turn)

    async def policy_changed(self, version: int, weights: list[Any]) -> None:
        self._coordinator.policy_changed(version, weights[0] if weights else None)

    async def next_version(self, timeout_s: float) -> Version | None:
        return await self._coordinator.next_version(timeout_s)

    async def metrics(self) -> dict[str, float]:
        return self._coordinator.metrics()

    async def leased(self) -> list[str]:
        return self._coordinator.leased()

    async def take_spans(self) -> dict[str, list[Span]]:
        """In the time of the wall clock."""
        shift_s = time.time() - time.monotonic()
        return {
            worker: [span.shifted(shift_s) for span in spans]
            for worker, spans in self._coordinator.take_spans().items()
        }

    async def shutdown(self) -> None:
        await self._coordinator.shutdown()
