"""The entry point that vLLM loads in every engine process (`vllm.general_plugins`).

vLLM logs and skips a plug-in that fails to load. So an engine asks every worker afterwards whether
the plug-in is active (`worker.tlt_report`). With `TLT_CONFIG` in the environment, the plug-in also
puts TLT into every engine that the process builds: `tlt.vllm.switch`.
"""

from __future__ import annotations

import os
from typing import Any

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

    log_engine()  # vLLM's workers are separate processes
    compat.apply()
    if not active:
        for backend, (module, name) in _CLASSES.items():
            WeightTransferEngineFactory.register_engine(backend, module, name)
    active = True
    if os.environ.get(SWITCH_VARIABLE, "").strip():
        from tlt.vllm import wiring

        wiring.install()


def probe() -> dict[str, Any]:
    """Load vLLM as an engine process does; return its device, versions, fixes and faults.

    vLLM keeps its patches, so call this in a separate process.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from tlt.vllm import compat

    is_cpu = current_platform.is_cpu()
    device = torch.device(current_platform.device_type)
    if is_cpu:
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
        from tlt.vllm.v1 import selftest

        faults = selftest.sampling_faults(device, is_keyed=not compat.skips("keyed"))
    else:  # engines on GPUs use vLLM's V2 runner
        from tlt.vllm.v2 import selftest as selftest_v2

        faults = selftest_v2.sampling_faults(selftest_v2.stand_in(device))
    return {
        "device": device.type,
        "vllm": compat.vllm_version(),
        "is_supported": compat.version_supported(compat.vllm_version(), is_cpu),
        "wanted": compat.supported_versions(is_cpu),
        "plugin": active,
        "fixes": compat.applied(),
        "faults": faults,
    }
