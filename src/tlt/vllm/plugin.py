"""The entry point that vLLM loads in every engine process (`vllm.general_plugins`).

vLLM logs and skips a plug-in that fails to load. So an engine asks every worker afterwards whether
the plug-in is active (`worker.tlt_report`). With `TLT_CONFIG` in the environment, the plug-in also
puts TLT into every engine that the process builds: `tlt.vllm.switch`.
"""

from __future__ import annotations

import os

from tlt.vllm.environment import SWITCH_VARIABLE, log_engine

_CLASSES = {
    "tlt_shm": ("tlt.vllm.transfer", "SharedMemoryTransfer"),
    "tlt_ipc": ("tlt.vllm.send", "IpcTransfer"),
    "tlt_nccl": ("tlt.vllm.send", "NcclTransfer"),
}

active = False


def register() -> None:
    """Apply the fixes and register our weight transfers. Safe to call twice."""
    global active
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from tlt.vllm import compat

    log_engine()  # vLLM's workers are processes of their own
    compat.apply()
    if not active:
        for backend, (module, name) in _CLASSES.items():
            WeightTransferEngineFactory.register_engine(backend, module, name)
    active = True
    if os.environ.get(SWITCH_VARIABLE, "").strip():
        from tlt.vllm import wiring

        wiring.install()
