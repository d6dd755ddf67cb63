"""The engine's side of a fingerprint, under kernels that pack or round matrices."""

import pytest

pytest.importorskip("vllm")
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from gpu.gpu_tensors import Gpu, GpuTensor
from tlt.node.fingerprint import columns, fingerprint
from tlt.vllm.policy_verifier import policy_fingerprint

SEED = 3


def tf32(matrix: torch.Tensor) -> torch.Tensor:
    """Round as tensor cores do that multiply float32: the lowest 13 bits are lost."""
    return (matrix.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class Kernel:
    """Multiplies with its own form of a layer's matrix."""

    def __init__(self, used: torch.Tensor) -> None:
        self.used = used

    def apply(self, layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.used)


class Layer(LinearBase):  # type: ignore[misc]
    def __init__(self, stored: torch.Tensor, used: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.input_size = stored.shape[1]
        self.quant_method = Kernel(used)


def policy(stored: torch.Tensor, used: torch.Tensor) -> nn.Module:
    return nn.ModuleDict({"up": Layer(stored, used)})


def test_a_float32_engine_on_a_gpu_whose_kernels_round_has_the_policy() -> None:
    weight = torch.randn(24, 64)
    changed = weight.clone()
    column = columns(SEED, 64)[0]
    changed[5, column] = torch.nextafter(changed[5, column], torch.tensor(9.0))
    with Gpu():
        for stored, is_same in ((weight, True), (changed, False)):
            model = policy(GpuTensor(stored), GpuTensor(tf32(stored)))
            found = policy_fingerprint(model, torch.float32, SEED)["up.weight"]
            assert found.same(fingerprint(weight, SEED)) == is_same


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_kernels_multiply_with_counts_where_they_round_nothing(on_gpu: bool) -> None:
    """A packed copy may be older than the matrix that a checkpoint was loaded into."""
    dtype = torch.bfloat16 if on_gpu else torch.float32
    place = GpuTensor if on_gpu else torch.Tensor.clone
    weight, stale = (torch.randn(24, 64).to(dtype) for _ in range(2))
    with Gpu():
        sound = policy(place(stale), place(weight))
        assert policy_fingerprint(sound, dtype, SEED)["up.weight"].same(fingerprint(weight, SEED))
        wrong = policy(place(weight), place(stale))
        found = policy_fingerprint(wrong, dtype, SEED)["up.weight"]
        assert not found.same(fingerprint(weight, SEED))
