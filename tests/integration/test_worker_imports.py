"""Importing the GPU worker leaves out vLLM's patches for a machine without a GPU."""

import subprocess
import sys

import pytest

from speed import limit

pytestmark = pytest.mark.vllm

PROGRAM = """
import sys
import torch
untouched = torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory
import tlt.vllm.{module}
assert "tlt.vllm.worker" in sys.modules
print("vllm.v1.worker.cpu.shm" in sys.modules)
print(untouched != (torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory))
"""


@pytest.mark.parametrize(("module", "patched"), [("worker", "False"), ("cpu_worker", "True")])
def test_only_the_cpu_worker_patches_torch(module: str, patched: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [patched, patched]
