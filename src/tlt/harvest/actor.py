"""The trainer's process on Ray, and the coordinator's handle on it. Weights are packed here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import ray
import torch

from tlt.hardware import thread_environment
from tlt.harvest.contract import Evaluation, Trained, TrainerFailed, TrainerGone, Weights
from tlt.harvest.trainer import HarvestTrainer, HarvestTrainerSettings
from tlt.logs import log_to_file
from tlt.node.cluster import end_actors, end_with_ray
from tlt.node.cores import bind_process

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Packed = dict[str, tuple[str, "np.ndarray[Any, Any]"]]
"""Tensors in a form that Ray passes on without copying: dtype and bytes."""


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    packed = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        packed[name] = (
            str(flat.dtype).removeprefix("torch."),
            flat.view(torch.uint8 if flat.dim() else flat.dtype).numpy(),
        )
    return packed


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(array).view(getattr(torch, dtype))
        for name, (dtype, array) in packed.items()
    }


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Cores, device and actor options of the trainer beside an engine."""

    cores: tuple[int, ...]
    on_gpu: bool
    options: dict[str, Any]
    """Options of the trainer's actor."""
    name: str = "trainer"
    """Name of the trainer and of its log file."""


class TrainerActor(HarvestTrainer):
    """A trainer in a separate process. `end` and the export run in threads in parallel to
    training."""

    def __init__(
        self, settings: HarvestTrainerSettings, cores: tuple[int, ...], on_gpu: bool, name: str
    ) -> None:
        end_with_ray()
        if settings.log is not None:
            log_to_file(settings.log.folder, name, settings.log.level)
        os.nice(19)  # the run has priority where both share cores
        if not on_gpu:
            bind_process(cores)
        torch.set_num_threads(max(1, len(cores)))
        super().__init__(settings, torch.device("cuda" if on_gpu else "cpu"))
        logger.info("the drafter of %s is loaded, process %d", settings.drafter, os.getpid())

    def pid(self) -> int:
        return os.getpid()

    def take_packed(self, versions: tuple[int | None, ...], *blobs: Packed | None) -> None:
        self.take(
            *(
                None
                if version is None
                else Weights(version, None if blob is None else unpack(blob))
                for version, blob in zip(versions, blobs, strict=True)
            )
        )

    def merge_packed(
        self, lease: int, own_weight: float, seconds: float, shares: list[float], *others: Packed
    ) -> bool:
        members = [(unpack(other), share) for other, share in zip(others, shares, strict=True)]
        return self.merge(lease, members, own_weight, seconds)

    def export_packed(self) -> Packed:
        return pack(self.export())

    def optimizer_state_packed(self) -> Packed:
        return pack(self.optimizer_state())


class RayTrainer:
    """The coordinator's handle on a trainer. Weights travel as references into Ray's store."""

    def __init__(self, settings: HarvestTrainerSettings, place: TrainerPlace) -> None:
        environment = thread_environment() | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, len(place.cores))),
        }
        options = dict(place.options)
        if (gpu := options.pop("gpu", None)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        actor = ray.remote(concurrency_groups={"control": 2})(TrainerActor)
        self._actor = actor.options(
            num_cpus=0,
            max_restarts=0,
            runtime_env={"env_vars": environment},
            **options,
        ).remote(settings, place.cores, place.on_gpu, place.name)

    async def start(self) -> None:
        await self._call(TrainerActor.pid)

    async def begin(self, lease: int, seconds: float) -> bool:
        return await self._call(TrainerActor.begin, lease, seconds)

    async def end(self, lease: int) -> None:
        await _answer(self._actor.end.options(concurrency_group="control").remote(lease))

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        weights = (base, published, policy)
        versions = tuple(None if w is None else w.version for w in weights)
        blobs = [None if w is None else w.blob for w in weights]
        await self._call(TrainerActor.take_packed, versions, *blobs)

    async def train(self, lease: int, seconds: float) -> Trained:
        return await self._call(TrainerActor.train, lease, seconds)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        return await self._call(TrainerActor.evaluate, lease, seconds)

    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool:
        blobs, shares = [blob for blob, _ in others], [share for _, share in others]
        return await self._call(
            TrainerActor.merge_packed, lease, own_weight, seconds, shares, *blobs
        )

    async def export(self) -> Any:
        blob = self._actor.export_packed.options(concurrency_group="control").remote()
        await _answer(blob)
        return blob

    async def optimizer_state(self) -> Any:
        # After training, not in parallel: the optimizer must not be in the middle of its step.
        return await self._call(TrainerActor.optimizer_state_packed)

    async def release(self) -> None:
        await self._call(TrainerActor.release)

    async def kill(self) -> None:
        await end_actors([self._actor])

    async def _call(
        self,
        method: Callable[Concatenate[TrainerActor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the actor, which turns references into the weights behind them."""
        answer: T = await _answer(getattr(self._actor, method.__name__).remote(*args, **kwargs))
        return answer


async def _answer(call: Any) -> Any:
    try:
        return await call
    except ray.exceptions.RayTaskError as error:
        raise TrainerFailed(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise TrainerGone("the trainer's process is gone") from error
