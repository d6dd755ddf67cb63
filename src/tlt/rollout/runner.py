"""Which of vLLM's model runners an engine uses: V1 on a CPU, V2 on GPUs.

V2 is vLLM's default, and its kernels need a GPU. vLLM's own variable `VLLM_USE_V2_MODEL_RUNNER`
overrides the choice: "0" takes V1 on GPUs, and "1" takes V2 on a CPU, where tests run its kernels
in Triton's interpreter.
"""

from __future__ import annotations

import os

from tlt.config.rollout import EngineConfig

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def uses_v2(config: EngineConfig) -> bool:
    """Return whether the engine runs on vLLM's V2 model runner."""
    given = os.environ.get(RUNNER_VARIABLE)
    return config.num_gpus > 0 if given is None else given == "1"
