"""The worker of CPU engines. Importing vLLM's CPU worker patches torch for a machine without GPU.

On V1, CPU engines sample by keyed noise, and their logits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

from tlt.vllm import compat
from tlt.vllm.v1 import invariant, sampler
from tlt.vllm.v1.runner import RunnerV1
from tlt.vllm.worker import AdaptiveWorker


class CPURunnerV1(RunnerV1):
    """vLLM's V1 model runner on CPU cores."""

    def install(self, runner: Any) -> None:
        super().install(runner)
        config = self._config
        if not compat.skips("keyed"):
            sampler.install(runner, config.speculative_config, config.model_config.seed)
        if self._is_invariant:
            invariant.prepare(runner)

    def loaded(self) -> None:
        if self._is_invariant:
            invariant.pad_head(self.runner.get_model())

    @property
    def _is_invariant(self) -> bool:
        """Whether logits must not depend on the batch: only float32 is exact enough to check it."""
        return bool(self._config.model_config.dtype == torch.float32)

    def end_step(self) -> None:
        # vLLM made a generator for every request with a seed. The keyed sampler needs none, and
        # vLLM 0.32 fails on a generator of a request whose prompt is not read to its end.
        self.runner.input_batch.generators.clear()


@contextmanager
def _groups_shared() -> Iterator[None]:
    """Let the groups of a worker that is alone be one: gloo wakes up 100 times a second for each.

    vLLM makes thirteen, and each holds only this worker. vLLM also destroys each of them; from then
    on, a destroyed group is left alone.
    """
    made: dict[Any, Any] = {}
    new_group, destroy = dist.new_group, dist.destroy_process_group

    def shared(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = None if ranks is None else tuple(ranks), kwargs.get("backend")
        if key not in made:
            made[key] = new_group(ranks, *args, **kwargs)
        return made[key]

    def destroy_once(group: Any = None) -> None:
        if group is None or group in dist.distributed_c10d._world.pg_map:
            destroy(group)

    dist.new_group, dist.destroy_process_group = shared, destroy_once
    try:
        yield
    finally:
        dist.new_group = new_group


class AdaptiveCPUWorker(AdaptiveWorker, CPUWorker):
    """One engine process on CPU cores."""

    def init_device(self) -> None:
        alone = self.vllm_config.parallel_config.world_size == 1
        with _groups_shared() if alone else nullcontext():
            super().init_device()

    def _make_v1(self) -> RunnerV1:
        return CPURunnerV1(self.vllm_config)
