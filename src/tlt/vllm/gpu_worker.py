"""The worker of GPU engines. Importing it leaves torch as it is."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from tlt.vllm.args import CONFIG_KEY
from tlt.vllm.worker import AdaptiveWorker


class AdaptiveGPUWorker(AdaptiveWorker, Worker):
    """One engine process on a GPU."""

    def determine_available_memory(self) -> int:
        """Return the memory for the KV cache, without the memory of catch-up.

        vLLM's profiling run skips no draft, so catch-up keeps nothing there.
        """
        available = int(super().determine_available_memory())
        if self.cache_config.kv_cache_memory_bytes:
            return available  # the user's own figure
        speculative = self.vllm_config.speculative_config
        has_model = speculative is not None and speculative.method == "eagle3"
        settings = self.vllm_config.additional_config[CONFIG_KEY]
        return available - (settings["drafter_state_bytes"] if has_model else 0)
