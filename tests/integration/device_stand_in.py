"""Stand-ins for NCCL's broadcast and CUDA IPC, so that vLLM's transfer engines run without a GPU.

Everything else is vLLM's own code: meeting, ranks, chunks, loading. `install` goes into the process
of every engine and of the sender.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch


class StoreCommunicator:
    """Broadcasts through the store of vLLM's process group instead of NCCL."""

    def __init__(self, group: Any, device: Any) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        sends = self._group.rank == src
        data = self._group.broadcast_obj(tensor.numpy().tobytes() if sends else None, src)
        if not sends:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def destroy(self) -> None:
        pass


class FileMemory:
    """Makes the buffers of CUDA IPC files that processes map; a handle is the file's path."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, num_bytes: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if device != "cuda":
            return torch.empty(num_bytes, dtype=dtype, device=device)
        descriptor, path = tempfile.mkstemp(dir="/dev/shm", prefix="tlt-test-ipc-")
        os.ftruncate(descriptor, num_bytes)
        os.close(descriptor)
        buffer = _mapped(path, num_bytes)
        self._paths[buffer.data_ptr()] = path
        return buffer

    def reduce(self, tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        return None, (self._paths[tensor.data_ptr()], tensor.numel(), 0, 0, 0, 0, 0)


def _mapped(path: str, num_bytes: int, *rest: Any) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


class _Properties:
    uuid = "GPU-0"


def install(engine: Any = None, put: Any = setattr) -> None:
    """Replace what needs a device; `put` as `setattr`, or as pytest's, which undoes it."""
    import torch.multiprocessing.reductions as reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    stream = type("Stream", (), {"synchronize": lambda self: None})
    context = type("Context", (), {"__enter__": lambda self: None, "__exit__": lambda *a: None})
    memory = FileMemory()
    put(pynccl, "PyNcclCommunicator", StoreCommunicator)
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.accelerator, "synchronize", lambda: None)
    put(torch.cuda, "Stream", lambda *args, **kwargs: stream())
    put(torch.cuda, "current_stream", lambda *args: stream())
    put(torch.cuda, "stream", lambda *args: context())
    put(torch.cuda, "is_available", lambda: False)
    put(torch.cuda, "ipc_collect", lambda: None)
    put(torch.cuda, "get_device_properties", lambda *args: _Properties())
    put(packed_tensor, "torch", memory)
    put(packed_tensor, "reduce_tensor", memory.reduce)
    put(ipc_engine, "rebuild_cuda_tensor", _mapped)
    put(reductions, "rebuild_cuda_tensor", _mapped)
