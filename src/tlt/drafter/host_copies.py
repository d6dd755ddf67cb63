"""Host memory of tensors that spend some time on a GPU.

The memory of a tensor that went to the GPU is kept, pinned, for its way back: a copy to pinned
memory is several times as fast as one to memory that is allocated for it. Pinning takes time, so it
happens on the way to the GPU, where nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = dict[str, torch.Tensor]


class HostCopies:
    def __init__(self) -> None:
        self._copies: Tensors = {}

    def send(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
        """Return copies of these host tensors on the device."""
        pins = device.type == "cuda"
        self._copies = {
            name: tensor.pin_memory() if pins and not tensor.is_pinned() else tensor
            for name, tensor in tensors.items()
        }
        return {
            name: tensor.to(device, non_blocking=True, copy=True)
            for name, tensor in self._copies.items()
        }

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the tensors in host memory, complete.

        A tensor that was made on the device, such as a first moment, gets new memory.
        """
        kept, self._copies = self._copies, {}
        found = {}
        for name, tensor in tensors.items():
            host = kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                found[name] = tensor.to("cpu", copy=True)
            else:
                found[name] = host.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return found
