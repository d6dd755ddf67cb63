"""Fingerprints tell any change of weights, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.rollout.fingerprint import (
    added,
    columns,
    fingerprints,
    tensor_fingerprint,
    values_fingerprint,
)
from tlt.rollout.weights import SharedWeights, read_fingerprints

DTYPES = [torch.float32, torch.bfloat16]


def matrix(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_with_one_hot_vectors_shows_the_columns(dtype: torch.dtype) -> None:
    """What an engine computes and what the learner reads come to the same number."""
    weight = matrix(96, 64, dtype=dtype)
    chosen = columns(3, 64)
    probe = torch.zeros(len(chosen), 64, dtype=dtype)
    probe[torch.arange(len(chosen)), chosen] = 1
    computed = torch.nn.functional.linear(probe, weight)
    assert values_fingerprint(computed) == tensor_fingerprint(weight, 3)


def test_fused_and_padded_matrices_add_up() -> None:
    parts = [matrix(rows, 64, seed) for seed, rows in enumerate((32, 16, 16))]
    fused = torch.cat([*parts, torch.zeros(8, 64)])
    assert tensor_fingerprint(fused, 1) == added(tensor_fingerprint(part, 1) for part in parts)
    assert tensor_fingerprint(fused.flip(0), 1) == tensor_fingerprint(fused, 1)


@given(st.integers(0, 95), st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_the_smallest_change_of_a_column_that_is_looked_at_shows(row: int, seed: int) -> None:
    weight = matrix(96, 64)
    changed = weight.clone()
    column = columns(seed, 64)[0]
    changed[row, column] = torch.nextafter(changed[row, column], torch.tensor(9.0))
    assert tensor_fingerprint(changed, seed) != tensor_fingerprint(weight, seed)


def test_in_the_long_run_all_columns_are_looked_at() -> None:
    assert {c for seed in range(100) for c in columns(seed, 64)} == set(range(64))
    assert all(len(columns(seed, 5)) == 5 for seed in range(3))
    assert columns(7, 64) == columns(7, 64)


def test_zeros_have_one_sign() -> None:
    assert values_fingerprint(torch.tensor([0.0, 1.0])) == values_fingerprint(
        torch.tensor([-0.0, 1.0])
    )
    assert values_fingerprint(torch.tensor([1e-40])) == 0


def test_what_is_handed_out_is_what_is_expected_in_the_engines_dtype() -> None:
    tensors = {"a": matrix(8, 32), "b": torch.randn(7)}
    lower = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    own = fingerprints(tensors.items(), torch.bfloat16, 5)
    assert own == {name: tensor_fingerprint(t, 5) for name, t in lower.items()}
    with SharedWeights(lower.items()) as weights:
        seed, found = read_fingerprints(str(weights.path))
    assert found == {n: ("bfloat16", tensor_fingerprint(t, seed)) for n, t in lower.items()}
