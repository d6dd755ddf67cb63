"""What importing a worker patches, and the process groups that a CPU worker makes."""

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


GROUPS = """
import torch.distributed as dist
from tlt.vllm.cpu_worker import _groups_shared
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with _groups_shared():
    first, second = dist.new_group([0]), dist.new_group([0])
print(first is second, dist.new_group([0]) is first)
dist.destroy_process_group(first)
dist.destroy_process_group(second)
dist.destroy_process_group()
"""


def test_groups_of_one_worker_are_one_and_end_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True", "False"]
