"""Weights in shared memory: what is written is what is read."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tlt.node.weights import SharedWeights, read_weights  # noqa: E402


def test_round_trip_of_all_dtypes_and_shapes() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 4).t(),
    }
    with SharedWeights(tensors.items()) as weights:
        loaded = dict(read_weights(weights.manifest()["path"]))
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert not weights.path.exists()


def test_a_mapping_outlives_its_file() -> None:
    weights = SharedWeights([("a", torch.ones(1000))])
    (loaded,) = (tensor for _, tensor in read_weights(str(weights.path)))
    weights.close()
    assert loaded.sum() == 1000


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0" * 100)
    with pytest.raises(ValueError, match="holds no weights"):
        dict(read_weights(str(path)))
