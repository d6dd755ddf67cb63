"""What vLLM and the plug-in say about themselves in a process that loads them; no engine starts."""

from __future__ import annotations

import os
from typing import Any


def probe() -> dict[str, Any]:
    """Load vLLM as an engine process does; return its device, versions, fixes and faults.

    vLLM keeps what it patches, so that this belongs into a process of its own.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from tlt.vllm import compat, plugin

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
        "plugin": plugin.active,
        "fixes": compat.applied(),
        "faults": faults,
    }
