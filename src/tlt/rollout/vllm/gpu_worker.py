"""The worker of GPU engines. Importing it leaves torch as it is."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from tlt.rollout.vllm.worker import AdaptiveWorker


class AdaptiveGPUWorker(AdaptiveWorker, Worker):
    """One engine process on a GPU."""
