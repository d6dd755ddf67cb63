"""The entry point that vLLM loads in every engine process (`vllm.general_plugins`).

vLLM logs and skips a plug-in that fails to load. So an engine asks every worker afterwards whether
the plug-in is active (`worker.tlt_report`).
"""

from __future__ import annotations

TRANSFER_BACKEND = "tlt_shm"

active = False


def register() -> None:
    """Apply the fixes and register the shared-memory weight transfer. Safe to call twice."""
    global active
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from tlt.rollout.vllm import compat

    compat.apply()
    if not active:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "tlt.rollout.vllm.transfer", "SharedMemoryTransfer"
        )
    active = True
