"""What the environment decides about an engine: vLLM's model runner, and how kernels round.

The model runner is V1 on a CPU, and V2 on GPUs.

V2 is vLLM's default, and its kernels need a GPU. vLLM's own variable `VLLM_USE_V2_MODEL_RUNNER`
overrides the choice: "0" takes V1 on GPUs, and "1" takes V2 on a CPU, where tests run its kernels
in Triton's interpreter.
"""

from __future__ import annotations

import os

from tlt.config.rollout import EngineConfig

SWITCH_VARIABLE = "TLT_CONFIG"
"""Environment variable that puts TLT into all engines of a program."""
TRANSFER_BACKENDS = {"shared_memory": "tlt_shm", "ipc": "tlt_ipc", "nccl": "tlt_nccl"}
"""Names of our backends of vLLM's weight transfer, by `EngineConfig.weights`."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"
ROUNDS_BY_BATCH = (
    f"GPU engines run without {INVARIANT_VARIABLE}=1: kernels round by the shape of the batch, so "
    "a near-tie between two tokens may fall differently in another batch, with or without drafts. "
    f"{INVARIANT_VARIABLE}=1 in the engines' environment prevents it; vLLM's kernels are then "
    "slower, and some attention backends are refused"
)
"""Warning to users of GPU engines with vLLM's default kernels."""


def rounds_by_batch(num_gpus: int) -> bool:
    """Return whether engines on GPUs, in this environment, round by the shape of the batch."""
    return num_gpus > 0 and os.environ.get(INVARIANT_VARIABLE, "0") in ("", "0")


def uses_v2(config: EngineConfig) -> bool:
    """Return whether the engine runs on vLLM's V2 model runner."""
    given = os.environ.get(RUNNER_VARIABLE)
    return config.num_gpus > 0 if given is None else given == "1"
