"""The ranks of `tlt drafter train` as Ray actors on this node, and the command's wait for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tlt.contracts import ShowProgress
from tlt.drafter.ranks import OneRank, Ranks
from tlt.errors import ConfigError, EngineError
from tlt.hardware import thread_environment
from tlt.node.cluster import end_actors, end_with_ray, this_node
from tlt.node.cores import bind_process
from tlt.node.shared import SharedFolder, run_environment
from tlt.offline.training import DrafterPlan, Text, train
from tlt.states.buffer import BufferSettings

SILENCE_S = 600.0
"""Seconds that a rank waits for the others, which may be capturing or evaluating."""
SHOW_S = 0.5


class DrafterRank:
    """A rank in its process."""

    def __init__(self, cores: tuple[int, ...], on_gpu: bool) -> None:
        end_with_ray()
        self._shown: tuple[str, float, float] = ("starting trainers", 0, 1)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        if not on_gpu:
            bind_process(cores)
        torch.set_num_threads(len(cores))
        # The same rows make the same gradients in every bit; GPUs warn where they cannot.
        torch.use_deterministic_algorithms(True, warn_only=on_gpu)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def train(self, meeting: str, rank: int, plan: DrafterPlan, *work: Any) -> list[dict[str, Any]]:
        """Meet the other ranks and train; `work` goes to `training.train`."""
        ranks = OneRank()
        if plan.num_ranks > 1:
            dist.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                init_method=f"file://{meeting}/ranks",
                rank=rank,
                world_size=plan.num_ranks,
                timeout=timedelta(seconds=SILENCE_S),
            )
            ranks = Ranks(self._device)
        texts, settings, until_s = work
        return train(plan, texts, settings, ranks, self._device, until_s, self._show)

    def _show(self, what: str, done: float, total: float) -> None:
        self._shown = what, done, total

    def shown(self) -> tuple[str, float, float]:
        """Return the progress, in parallel to training."""
        return self._shown


def here(name: str = "") -> dict[str, Any]:
    """Return the options that put an actor on this node."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(this_node(), soft=False)}


def check_gpus(num_gpus: int) -> None:
    """Refuse to wait for GPUs that this node does not have."""
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    if num_gpus > (found := int(nodes[this_node()].get("GPU", 0))):
        raise ConfigError(
            f"--engines times --gpus is {num_gpus}, but Ray finds {found} GPUs on this node; "
            f"{'lower them' if found else 'leave --gpus out to use CPU cores'}"
        )


async def train_on_ranks(
    plan: DrafterPlan,
    gpus: Sequence[str],
    texts: Sequence[Text],
    settings: BufferSettings,
    until_s: float,
    show: ShowProgress,
) -> list[dict[str, Any]]:
    """Train on the planned ranks, each on one of these GPUs, or on its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    meeting, shared = SharedFolder.make("meeting"), ray.put(texts)
    environment = thread_environment() | run_environment()
    environment |= {"HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    actors, calls = [], []
    try:
        for rank in range(plan.num_ranks):
            own = tuple(cores[rank :: plan.num_ranks])
            device = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}
            threads = {"OMP_NUM_THREADS": str(len(own))}
            actor = ray.remote(concurrency_groups={"show": 1})(DrafterRank).options(
                num_cpus=0,
                max_restarts=0,
                runtime_env={"env_vars": environment | threads | device},
                **here(),
            )
            actors.append(actor.remote(own, bool(gpus)))
        work = (plan, shared, settings, until_s)
        calls = [
            asyncio.ensure_future(_answer(actor.train.remote(str(meeting.path), rank, *work), rank))
            for rank, actor in enumerate(actors)
        ]
        while True:
            done, waiting = await asyncio.wait(
                calls, timeout=SHOW_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for call in done:
                call.result()  # the first rank that fails ends the others
            if not waiting:
                return calls[0].result()
            shown = actors[0].shown.options(concurrency_group="show").remote()
            show(*await _answer(shown, 0))
    finally:
        await end_actors(actors)
        await asyncio.gather(*calls, return_exceptions=True)
        meeting.remove()


async def _answer(call: Any, rank: int) -> Any:
    try:
        return await call
    except ray.exceptions.RayTaskError as error:
        raise EngineError(f"rank {rank} of the training failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"rank {rank} of the training is gone, perhaps for lack of memory; "
            "lower --ranks or --row-tokens"
        ) from error
