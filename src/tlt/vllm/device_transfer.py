"""vLLM's own weight transfer from GPU to GPU: backends `tlt_ipc` and `tlt_nccl`.

`tlt_ipc` is for colocated engines: a learner rank on the same GPU shares its tensors by CUDA IPC.
`tlt_nccl` is for engines with GPUs of their own, on any node: rank 0 of the learner broadcasts.
`send` is the learner's half.

vLLM has one transfer engine per worker. These also read files in shared memory, as `tlt_shm` does:
drafters come that way, and the policy of an engine that replaces a lost one.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from tlt.node.weights import read_weights
from tlt.vllm import compat


class _FilesToo:
    """The part that both backends share, mixed in before vLLM's class."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "path" in update_info:
            compat.load(self.model, read_weights(update_info["path"]))  # type: ignore[attr-defined]
        else:
            super().update_weights(update_info)  # type: ignore[misc]


class IpcTransfer(_FilesToo, IPCWeightTransferEngine):
    """Loads tensors that a learner rank shares on the same GPU."""


class NcclTransfer(_FilesToo, NCCLWeightTransferEngine):
    """Loads tensors that rank 0 of the learner broadcasts."""
