"""A stand-in for CUDA: vLLM's own CudaPlatform on a machine without a GPU.

vLLM decides by platform which model runner, attention backend, graphs and classes an engine gets.
Here its class for GPUs answers, and only the questions to the driver have fixed answers. No kernel
runs. What this replaces stays replaced, so it belongs into a process of its own: `under`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine_process import call_in_process


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the driver says of one kind of GPU."""

    name: str
    capability: tuple[int, int]
    num_bytes: int
    flash_attention: tuple[int, ...]
    """Versions of FlashAttention in vLLM's wheel that run on it."""


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79 * 2**30, (2,)),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79 * 2**30, (2, 3)),
    "B200": Gpu("NVIDIA B200", (10, 0), 178 * 2**30, (2, 4)),
}
NUM_GPUS = 8

_context = multiprocessing.get_context("spawn")


def under(gpu: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in a process of its own, under a node with these GPUs."""
    return call_in_process(_context, partial(install, GPUS[gpu]), function, *args)


def install(gpu: Gpu) -> None:
    """Let vLLM in this process see a node of GPUs. Call it before anything imports vLLM."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    _add_compiled_modules(gpu)
    import torch
    import vllm.platforms as platforms

    # vLLM switches Triton off where it finds no driver, except in its own check of a build.
    matches = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda text: text != "cpu" and matches(text)
    torch.backends.cuda.enable_cudnn_sdp = lambda *_: None
    platforms._current_platform = _platform(gpu)
    import vllm._custom_ops as ops
    import vllm.config.vllm as config

    config.HAS_TRITON = True
    for name in dir(ops):
        if name.startswith("cutlass") and "support" in name:
            setattr(ops, name, lambda *_: False)


def _platform(gpu: Gpu) -> Any:
    """Return vLLM's platform of CUDA devices, with this answer to each question to the driver."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*gpu.capability)

    def has(cls: Any, wanted: Any, device_id: int = 0) -> bool:
        return bool(capability >= (wanted if isinstance(wanted, tuple) else divmod(wanted, 10)))

    answers: dict[str, Callable[..., Any]] = {
        "get_device_capability": lambda cls, device_id=0: capability,
        "has_device_capability": has,
        "get_device_name": lambda cls, device_id=0: gpu.name,
        "get_device_total_memory": lambda cls, device_id=0: gpu.num_bytes,
        "device_count": lambda cls: NUM_GPUS,
        "is_fully_connected": lambda cls, ids: True,
        "get_cuda_runtime_major": lambda cls: 13,
        "num_compute_units": lambda cls, device_id=0: 132,
        "is_pin_memory_available": lambda cls: True,
    }
    members: dict[str, Any] = {name: classmethod(answer) for name, answer in answers.items()}
    members["is_cumem_allocator_available"] = lambda self: True
    return type("StandInCudaPlatform", (NonNvmlCudaPlatform,), members)()


def _add_compiled_modules(gpu: Gpu) -> None:
    """Add empty modules where the wheel for GPUs has compiled ones."""
    for name in ("_C_stable_libtorch", "_C", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    attention: Any = types.ModuleType("vllm.vllm_flash_attn")
    attention.__path__ = []
    for name in (
        "compile_flash_attn_varlen_func_from_specs",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
        "get_scheduler_metadata",
    ):
        setattr(attention, name, lambda *args, **kwargs: None)
    interface: Any = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    interface.is_fa_version_supported = lambda version, *_: version in gpu.flash_attention
    interface.fa_version_unsupported_reason = lambda version, *_: None
    sys.modules[attention.__name__] = attention
    sys.modules[interface.__name__] = interface
