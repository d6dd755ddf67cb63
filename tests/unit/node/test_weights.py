"""Weights in shared memory: what is written is what is read."""

import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tlt.node.weights import SharedWeights, file_bytes, read_weights  # noqa: E402


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


def test_the_bytes_of_a_file_make_the_same_file_on_another_node() -> None:
    tensors = {"a": torch.randn(300, 5), "b": torch.randn(7).to(torch.bfloat16)}
    with SharedWeights(tensors.items(), seed=3) as weights:
        raw = file_bytes(str(weights.path))
    with SharedWeights.of_bytes(raw) as again:
        loaded = dict(read_weights(str(again.path)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_bytes_travel_out_of_band() -> None:
    """Pickling the array copies nothing: Ray ships its buffer as it is."""
    with SharedWeights([("a", torch.randn(1000, 100))]) as weights:
        raw = file_bytes(str(weights.path))
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(raw, protocol=5, buffer_callback=buffers.append)
    assert len(inside) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == len(raw) > 400_000


def test_damaged_bytes_are_refused() -> None:
    with SharedWeights([("a", torch.ones(100, 4))]) as weights:
        raw = file_bytes(str(weights.path))
    damaged = raw.copy()
    damaged[-1000:] = 7
    before = set(Path("/dev/shm").glob("tlt-weights-*"))
    with pytest.raises(ValueError, match="a was damaged"):
        SharedWeights.of_bytes(damaged)
    assert set(Path("/dev/shm").glob("tlt-weights-*")) <= before
