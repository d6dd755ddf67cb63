"""What environment variables decide about an engine: vLLM's model runner, and how kernels round.

The model runner is V1 on a CPU, and V2 on GPUs.

V2 is vLLM's default, and its kernels need a GPU. vLLM's own variable `VLLM_USE_V2_MODEL_RUNNER`
overrides the choice: "0" takes V1 on GPUs, and "1" takes V2 on a CPU, where tests run its kernels
in Triton's interpreter.

All processes of an engine log to the engine's file, if the environment names one.
"""

from __future__ import annotations

import json
import os

from tlt.config.rollout import EngineConfig
from tlt.logs import LogSettings, log_to_file

SWITCH_VARIABLE = "TLT_CONFIG"
"""Environment variable that puts TLT into all engines of a program."""
TRANSFER_BACKENDS = {"shared_memory": "tlt_shm", "ipc": "tlt_ipc", "nccl": "tlt_nccl"}
"""Names of our backends of vLLM's weight transfer, by `EngineConfig.weights`."""
LOG_VARIABLE = "TLT_ENGINE_LOG"
"""Environment variable that says where, by which name and from which level on an engine logs."""
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


def log_environment(log: LogSettings | None, name: str) -> dict[str, str]:
    """Return the environment of an engine whose processes log to its file.

    vLLM logs there too: warnings, or what the user's `VLLM_LOGGING_LEVEL` asks for. The user's own
    config file of vLLM's logging wins.
    """
    if log is None:
        return {}
    found = {LOG_VARIABLE: json.dumps([log.folder, name, log.level])}
    if not os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
        level = "DEBUG" if log.level == "debug" else "WARNING"
        level = os.environ.get("VLLM_LOGGING_LEVEL", level)
        found |= {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_LEVEL": level}
    return found


def log_engine() -> None:
    """Let this process of an engine log to the engine's file, if the environment names one."""
    if LOG_VARIABLE in os.environ:
        is_ours = os.environ.get("VLLM_CONFIGURE_LOGGING") == "0"
        others = {"vllm": os.environ["VLLM_LOGGING_LEVEL"]} if is_ours else {}
        folder, name, level = json.loads(os.environ[LOG_VARIABLE])
        log_to_file(folder, name, level, others)
