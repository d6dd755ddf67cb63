"""Tensors that say they are on a GPU, and hold their numbers in host memory.

Under `Gpu`, whatever is made on or moved to the device "cuda:0" becomes a `GpuTensor`. An operation
computes the numbers on the CPU, after it has refused what a GPU refuses: tensors of two devices in
one operation. So code runs as it would on a GPU, control flow included, without one. Kernels that
only a GPU has do not run. Torch's own FakeTensor on "cuda" needs a build of torch with CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
aten: Any = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
"""Operations that take tensors of two devices."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations whose indices may be on the host."""
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
"""Operations whose result the host must know before it goes on."""

KERNELS: dict[Any, Callable[..., Any]] = {}
"""What computes, on the CPU, operations that only a GPU has."""


class GpuTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on the stand-in for a GPU.

    To torch's C++ it is on "meta", a device of every build, which computes nothing by itself.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> GpuTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    # torch's C++ would move lists and numbers of an index expression to "meta", and lose them.

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=self.dtype, device=DEVICE)
        super().__setitem__(_indices(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"GpuTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Stream:
    """A stream or an event of the stand-in: everything in it has ended."""

    def __init__(self, device: Any = None, blocking: bool = False) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


CUDA: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "Stream": Stream,
    "Event": Stream,
    "current_stream": Stream,
    "stream": lambda stream: stream,
}
"""Functions of `torch.cuda` in the context."""


class Gpu(TorchDispatchMode):  # type: ignore[misc]
    """The context in which "cuda:0" exists; `num_waits` counts how often the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def __enter__(self) -> Any:
        self._before = {name: getattr(torch.cuda, name) for name in CUDA}
        self._only_lifts = torch._C._only_lift_cpu_tensors()
        for name, replaced in CUDA.items():
            setattr(torch.cuda, name, replaced)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` comes by here
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, original in self._before.items():
            setattr(torch.cuda, name, original)
        torch._C._set_only_lift_cpu_tensors(self._only_lifts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_gpu((args, kwargs)):
            leaves = func in COPIES and not _makes_gpu(func, args, kwargs)
            self.num_waits += func in WAITS or (leaves and not kwargs.get("non_blocking", False))
        return run(func, args, kwargs)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation on the numbers in host memory, or refuse it as a GPU would."""
    is_gpu = _is_gpu((args, kwargs))
    if is_gpu and func not in COPIES:
        for leaf in tree_leaves((args[:1], args[2:]) if func in INDEXED else (args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, GpuTensor) and leaf.dim():
                raise RuntimeError(f"{func}: a tensor {tuple(leaf.shape)} on cpu, others on cuda:0")
        assert not any(leaf.is_meta for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    if held_kwargs.get("device") is not None:
        held_kwargs["device"] = torch.device("cpu")
    if "pin_memory" in held_kwargs:
        held_kwargs["pin_memory"] = False
    out = KERNELS.get(func, func)(*held_args, **held_kwargs)
    if not _makes_gpu(func, args, kwargs):
        return out
    wrapped = tree_map(lambda x: GpuTensor(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if is_gpu else wrapped


def _makes_gpu(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the result of an operation is on the stand-in."""
    if func is aten.copy_.default:
        return isinstance(args[0], GpuTensor)
    device = kwargs.get("device")
    return _is_gpu((args, kwargs)) if device is None else torch.device(device).type != "cpu"


def _is_gpu(values: Any) -> bool:
    return any(isinstance(leaf, GpuTensor) for leaf in tree_leaves(values))


def _indices(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value
