"""What this machine's processor can do, and the settings of processes that follow from it.

This module imports only the standard library, because it is used before torch is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
DtypeChoice = Literal["auto", "bfloat16", "float32"]

BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Instructions that multiply bfloat16 matrices, on x86 and (`bf16`) on Arm."""


def thread_environment() -> dict[str, str]:
    """Return environment variables for a process with several OpenMP threads.

    The process must have them before it loads torch. Threads of GNU OpenMP spin while they wait for
    each other. When another process takes one of their cores, the spinning threads use up the time
    in which the delayed thread could catch up. A value of the user wins.
    """
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "0")}


DRIVER_S = 30.0
"""Seconds in which nvidia-smi must answer."""
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of one node; None where it is not known."""

    num_gpus: int | None
    gpu_bytes: int | None
    """Memory of its smallest GPU."""
    host_bytes: int | None


def this_machine() -> Machine:
    """Return the memory of this machine, of its GPUs as the driver reports it."""
    gpus = [int(line) * 2**20 for line in gpu_report("memory.total").split() if line.isdigit()]
    return Machine(len(gpus) or None, min(gpus, default=None), _host_bytes())


def gpu_report(fields: str) -> str:
    """Return a line with these fields for every GPU, as nvidia-smi reports them; empty if none."""
    code, text = ask_driver(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return "" if code else text


def ask_driver(*arguments: str) -> tuple[int, str]:
    """Return the exit code of nvidia-smi and what it prints; a broken driver may never answer."""
    command = ["nvidia-smi", *arguments]
    if not shutil.which(command[0]):
        return 1, ""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        said, errors = process.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a hanging driver keeps its process
            process.communicate(timeout=1.0)
        return 1, f"no answer from {' '.join(command)} within {DRIVER_S:g} s"
    return process.returncode, said or errors


def _host_bytes() -> int | None:
    """Return the memory of this machine, or of the container that this process is in."""
    try:
        lines = MEMORY_INFO.read_text().splitlines()
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        return min(total, int(MEMORY_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that the kernel reports; empty if it reports none."""
    return frozenset(_cpu_info("flags", "Features").split())


def cpu_model() -> str:
    """Return the name of the processor."""
    return _cpu_info("model name") or "unknown"


def _cpu_info(*keys: str) -> str:
    """Return the first core's value of one of these keys in the kernel's report."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(keys)), "")


def compute_dtype(
    choice: DtypeChoice = "auto", *, on_gpu: bool = False, flags: Set[str] | None = None
) -> Dtype:
    """Return the dtype of matrix products: the chosen one, or the fast one on this machine.

    A CPU without bfloat16 instructions emulates bfloat16 products at a fraction of the speed of
    float32 ones.
    """
    if choice != "auto":
        return choice
    if on_gpu:
        return "bfloat16"
    found = cpu_flags() if flags is None else flags
    return "bfloat16" if BFLOAT16_FLAGS & found else "float32"


def why_dtype(flags: Set[str]) -> str:
    """Return in words which dtype `auto` chooses on a CPU with these instructions, and why."""
    found = sorted(BFLOAT16_FLAGS & flags)
    if found:
        return f"bfloat16: this CPU multiplies it ({', '.join(found)})"
    return "float32: this CPU only emulates bfloat16"
