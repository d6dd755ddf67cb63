"""The kernels that engines on GPUs launch compile for each architecture, without a device."""

import os

import pytest

from gpu.kernels import ARCHITECTURES, compiled, launches
from gpu.stand_in import under

pytestmark = pytest.mark.vllm


@pytest.mark.gate
def test_the_kernels_of_engines_compile() -> None:
    """In the gate a part of the variants, for one architecture."""
    is_all = "CHECK_ALL" in os.environ
    architectures = list(ARCHITECTURES) if is_all else ["sm_90"]
    found = under("H100", compiled, launches(), architectures, 1 if is_all else 8)
    assert len(found["kernels"]) > 20
    assert not found["faults"]


def test_a_launch_that_does_not_compile_is_a_fault() -> None:
    module, name, kinds, options = launches()[0]
    assert kinds["LOGITS"][0] == "tensor"
    wrong = (module, name, kinds | {"LOGITS": ["float"]}, options)
    (fault,) = under("H100", compiled, [wrong], ["sm_90"])["faults"]
    assert f"{module}.{name}, sm_90, float32" in fault
