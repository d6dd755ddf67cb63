"""vLLM's own weight transfer from GPU to GPU: the learner's half, and the engines'.

The backend `tlt_ipc` is for colocated engines: a learner rank on the same GPU shares its tensors by
CUDA IPC. `tlt_nccl` is for engines on separate GPUs, on any node: rank 0 of the learner
broadcasts.

vLLM's trainer engines drive the transfer: connect, start, update chunk by chunk, finish. They call
the engines through a client, here `TransferClient`. Every rank of the learner holds a
`PolicySender`, because every rank takes part in gathering the tensors; only rank 0 calls engines.

Fingerprints are made of the tensors that are sent, and the engines compare them with what they
loaded. Engines check names and shapes before they start an update, because they cannot undo one.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from tlt.node.fingerprint import Fingerprint, fingerprint
from tlt.node.weights import read_weights
from tlt.vllm import compat

Shapes = list[tuple[str, list[int]]]
Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class Links(Protocol):
    """Calls to all engines of a route."""

    @property
    def num_workers(self) -> tuple[int, ...]:
        """Workers (GPUs) of each engine."""
        ...

    def connect(self, init_infos: Sequence[dict[str, Any]]) -> None: ...
    def start(self, shapes: Shapes) -> None: ...
    def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish(self, version: int, seed: int, fingerprints: dict[str, Any]) -> None: ...


class PolicySource(WeightSource):
    """The learner's policy, tensor by tensor; notes the fingerprint of each one."""

    def __init__(
        self, shapes: Shapes, dtype: torch.dtype, weights: Weights, is_sender: bool
    ) -> None:
        self.shapes = shapes
        self._dtype = dtype
        self._weights = weights
        self._is_sender = is_sender
        self.begin(())

    def begin(self, keep: Sequence[str]) -> None:
        """Begin another version of the policy; keep copies of these tensors on the host."""
        self.seed = secrets.randbits(31)
        self.fingerprints: dict[str, Fingerprint] = {}
        self.kept: list[tuple[str, torch.Tensor]] = []
        self._keep = frozenset(keep)

    @compat.declared
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, tuple(shape)) for name, shape in self.shapes]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights():
            if self._is_sender:
                self.fingerprints[name] = fingerprint(tensor, self.seed)
                if name in self._keep:
                    self.kept.append((name, tensor.cpu()))
            yield name, tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:  # the same before vLLM 0.33
        return self.iter_full()


class TransferClient:
    """Carries each call of vLLM's trainer engines to all engines of the route."""

    def __init__(self, links: Links, source: PolicySource) -> None:
        self._links = links
        self._source = source
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engines. Each has its own ranks in the group: vLLM counts within one
        engine."""
        first, infos = init_info.get("rank_offset", 0), []
        for num_workers in self._links.num_workers:
            own = {"rank_offset": first} if "rank_offset" in init_info else {}
            infos.append(init_info | own)
            first += num_workers
        self._links.connect(infos)

    def start_weight_update(self) -> None:
        self._links.start(self._source.shapes)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._links.receive(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._links.finish(self.version, self._source.seed, self._source.fingerprints)


class PolicySender:
    """One rank's part in sending the policy to engines."""

    def __init__(
        self,
        backend: str,
        rank: int,
        host: str,
        links: Links,
        shapes: Shapes,
        dtype: torch.dtype,
        weights: Weights,
    ) -> None:
        self._source = PolicySource(shapes, dtype, weights, is_sender=rank == 0)
        self._client = TransferClient(links, self._source)
        self._engine: Any
        if backend == "ipc":
            # Chunks bound the memory of the copies that are shared. vLLM refuses a tensor that is
            # larger than a chunk: the embedding of a 7B model is larger than vLLM's default.
            largest = max(math.prod(shape) for _, shape in shapes) * dtype.itemsize
            size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
            self._engine = IPCTrainerWeightTransferEngine.trainer_init(
                IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size),
                client=self._client,
                source=self._source,
            )
        else:
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
                NCCLTrainerInitInfo(
                    rank=rank,
                    master_address=host,
                    master_port=_free_port(),
                    world_size=1 + sum(links.num_workers),
                    packed=True,
                ),
                client=self._client,
                source=self._source,
            )

    def send(self, version: int, keep: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """Send the present policy; rank 0 returns copies of the tensors named in `keep`."""
        self._source.begin(keep)
        self._client.version = version
        self._engine.send_weights()
        return self._source.kept

    def close(self) -> None:
        """Leave the group of engines."""
        self._engine.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# --- the engines' half ---------------------------------------------------------------------------


class _FilesToo:
    """The part that both backends share, mixed in before vLLM's class.

    vLLM has one transfer engine per worker. These also read files in shared memory, as `tlt_shm`
    does: drafters come that way, and the policy of an engine that replaces a lost one.
    """

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "path" in update_info:
            compat.load(self.model, read_weights(update_info["path"]))  # type: ignore[attr-defined]
        else:
            super().update_weights(update_info)  # type: ignore[misc]


class IpcTransfer(_FilesToo, IPCWeightTransferEngine):
    """Loads tensors that a learner rank shares on the same GPU."""


class NcclTransfer(_FilesToo, NCCLWeightTransferEngine):
    """Loads tensors that rank 0 of the learner broadcasts."""
