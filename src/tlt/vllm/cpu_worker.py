"""The worker of CPU engines. Importing vLLM's CPU worker patches torch for a machine without GPU.

On V1, CPU engines sample by keyed noise, and their logits do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
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
        """Whether logits must not depend on the batch: only float32 is exact enough to tell."""
        return bool(self._config.model_config.dtype == torch.float32)

    def end_step(self) -> None:
        # vLLM made a generator for every request with a seed. The keyed sampler needs none, and
        # vLLM 0.32 fails on a generator whose request still has a part of its prompt to come.
        self.runner.input_batch.generators.clear()


class AdaptiveCPUWorker(AdaptiveWorker, CPUWorker):
    """One engine process on CPU cores."""

    def _make_v1(self) -> RunnerV1:
        return CPURunnerV1(self.vllm_config)
