"""Fingerprints show every change of weights, and nothing else."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tlt.node.fingerprint import columns, fingerprint, fingerprints, fused, of_columns
from tlt.node.weights import SharedWeights, check_weights, read_fingerprints


def matrix(
    rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_one_hot_vectors_shows_the_columns(dtype: torch.dtype) -> None:
    """The engine's products and the learner's tensors have the same fingerprint."""
    weight = matrix(96, 64, dtype=dtype)
    chosen = columns(3, 64)
    probe = torch.zeros(len(chosen), 64, dtype=dtype)
    probe[torch.arange(len(chosen)), chosen] = 1
    computed = torch.nn.functional.linear(probe, weight)
    assert of_columns(computed.T).same(fingerprint(weight, 3))


def test_fused_and_padded_matrices_follow_from_their_parts_in_order() -> None:
    parts = [matrix(rows, 64, seed) for seed, rows in enumerate((32, 16, 16))]
    together = fingerprint(torch.cat([*parts, torch.zeros(8, 64)]), 1)
    assert together.same(fused([fingerprint(part, 1) for part in parts]))
    assert not together.same(fused([fingerprint(part, 1) for part in reversed(parts)]))
    assert fingerprint(torch.tensor([0.0, 1.0]), 0) == fingerprint(torch.tensor([-0.0, 1.0]), 0)
    assert fingerprint(torch.tensor([1e-40]), 0)[:2] == (0, 0)
    weight = matrix(96, 6)
    assert not fingerprint(weight.flip(0), 1).same(fingerprint(weight, 1))
    assert not fingerprint(weight.flip(1), 1).same(fingerprint(weight, 1))
    vector = torch.arange(16.0)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        flipped = fingerprint(vector.flip(0), 1, dtype)
        assert not flipped.same(fingerprint(vector, 1, dtype))


@given(st.integers(0, 95), st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_the_smallest_change_of_a_column_that_is_looked_at_shows(row: int, seed: int) -> None:
    weight = matrix(96, 64)
    changed = weight.clone()
    column = columns(seed, 64)[0]
    changed[row, column] = torch.nextafter(changed[row, column], torch.tensor(9.0))
    assert not fingerprint(changed, seed).same(fingerprint(weight, seed))


def test_in_the_long_run_all_columns_are_looked_at() -> None:
    assert {c for seed in range(100) for c in columns(seed, 64)} == set(range(64))
    assert all(len(columns(seed, 5)) == 5 for seed in range(3))
    assert columns(7, 64) == columns(7, 64)


def test_what_is_handed_out_is_what_is_expected_in_the_engines_dtype() -> None:
    tensors = {"a": matrix(8, 32), "b": torch.randn(7)}
    lower = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    own = fingerprints(tensors.items(), torch.bfloat16, 5)
    assert own == {name: fingerprint(t, 5) for name, t in lower.items()}
    with SharedWeights(lower.items()) as weights:
        seed, found = read_fingerprints(str(weights.path))
    assert found == {n: ("bfloat16", fingerprint(t, seed)) for n, t in lower.items()}


def test_a_policy_of_which_something_is_missing_is_refused(tmp_path: Path) -> None:
    whole = {"q.weight": matrix(8, 8), "k.weight": matrix(4, 8), "lm_head.weight": matrix(9, 8)}
    save_file(whole | {"rotary.inv_freq": torch.ones(2)}, tmp_path / "model.safetensors")
    with SharedWeights([("q.weight", whole["q.weight"])]) as part:
        with pytest.raises(ValueError, match=r"k\.weight"):
            check_weights(str(part.path), tmp_path, whole=True)
        check_weights(str(part.path), tmp_path, whole=False)
    tied = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    with SharedWeights(tied.items()) as enough:
        check_weights(str(enough.path), tmp_path, whole=True)
