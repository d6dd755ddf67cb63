"""vLLM's weight-transfer API over shared memory: backend `tlt_shm`.

The backend loads policy and drafter weights into all workers of a node, through the host's memory.
GPU engines take their policy from GPU to GPU instead (`send`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tlt.node.weights import read_weights
from tlt.vllm import compat


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    pass


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    path: str


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Loads a `tlt.node.weights.SharedWeights` file into the policy or the drafter."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Do nothing: each update names its file."""

    def start_weight_update(self) -> None:
        compat.begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would also synchronize an accelerator, which a CPU engine does not have.
        # Reading from host memory is synchronous anyway.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        compat.load(self.model, read_weights(update_info.path))

    def finish_weight_update(self) -> None:
        compat.end_reload(self.model, self.model_config)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: the learner writes the file. vLLM before 0.28 wants every backend to have it."""
        raise NotImplementedError

    def shutdown(self) -> None:
        pass
