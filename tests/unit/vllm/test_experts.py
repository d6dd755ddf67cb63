"""The columns of experts, read from what vLLM's CPU kernels have packed."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from tlt.node.fingerprint import fingerprint, of_columns
from tlt.vllm import experts

SEED = 3


def layer(backend: str, size: int = 64, padded: int = 64, **kernel: Any) -> Any:
    fused = SimpleNamespace(**kernel, _padded_intermediate_size=lambda config: padded)
    return SimpleNamespace(
        moe_config=SimpleNamespace(intermediate_size_per_partition=size, hidden_dim=96),
        quant_method=SimpleNamespace(
            unquantized_backend=SimpleNamespace(value=backend),
            moe_kernel=SimpleNamespace(fused_experts=fused),
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_have_the_fingerprint_of_plain_ones(dtype: torch.dtype) -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    cpu = layer("CPU", isa="vec", _use_zentorch=False)
    assert experts.is_readable(cpu)
    for stack in (torch.randn(4, 128, 96).to(dtype), torch.randn(4, 96, 64).to(dtype)):
        expected = fingerprint(stack, SEED)
        packed = cpu_prepack_moe_weight(stack, "vec")
        assert not packed.equal(stack)
        assert of_columns(experts.columns_of(cpu, packed, SEED)) == expected
        other = cpu_prepack_moe_weight(stack[[1, 0, 2, 3]].contiguous(), "vec")
        assert of_columns(experts.columns_of(cpu, other, SEED)) != expected
        assert of_columns(experts.columns_of(cpu, stack, SEED)) != expected, "not packed"
        plain = layer("TRITON")
        assert of_columns(experts.columns_of(plain, stack, SEED)) == expected


def test_other_forms_are_not_read() -> None:
    assert experts.is_readable(layer("TRITON"))
    assert not experts.is_readable(layer("FlashInfer CUTLASS"))
    assert not experts.is_readable(layer("CPU", isa="vec", size=48, padded=64))
    assert not experts.is_readable(layer("CPU", isa="vec", size=2**14, padded=2**14))
    assert not experts.is_readable(SimpleNamespace(quant_method=None))


def test_a_token_gets_equal_numbers_from_its_experts_in_any_batch() -> None:
    """The CPU kernel in float32, where tokens of other requests use the same experts or others."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    num_tokens, num_experts, hidden, size = 70, 16, 256, 96
    stacks = torch.randn(num_experts, 2 * size, hidden), torch.randn(num_experts, hidden, size)
    packed = [cpu_prepack_moe_weight(stack / 10, "vec") for stack in stacks]
    x = torch.randn(num_tokens, hidden)
    chosen = torch.stack([torch.randperm(num_experts)[:4] for _ in x]).int()
    weight = torch.rand(num_tokens, 4)

    def outputs(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(tokens), hidden)
        cpu_fused_moe(
            out, x[tokens], *packed, None, None, weight[tokens], chosen[tokens], "silu", "vec"
        )
        return out

    whole = outputs(torch.arange(num_tokens))
    for count in (1, 2, 3, 5, 8, 16, 33, 64):
        for _ in range(8):
            tokens = torch.randperm(num_tokens)[:count]
            assert outputs(tokens).equal(whole[tokens]), count
