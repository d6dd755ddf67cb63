"""Weights in shared memory: what is written is what is read."""

import os
import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tlt.node.shared import remove_abandoned, run_id, user_folder  # noqa: E402
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


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0" * 100)
    with pytest.raises(ValueError, match="holds no weights"):
        dict(read_weights(str(path)))


def test_the_bytes_of_a_file_make_the_same_file_on_another_node() -> None:
    tensors = {"a": torch.randn(1000, 100), "b": torch.randn(7).to(torch.bfloat16)}
    with SharedWeights(tensors.items()) as weights:
        raw = file_bytes(str(weights.path))
    # Pickling the array copies nothing: Ray ships its buffer as it is.
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(raw, protocol=5, buffer_callback=buffers.append)) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == len(raw) > 400_000
    with SharedWeights.of_bytes(raw) as again:
        loaded = dict(read_weights(str(again.path)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    damaged = raw.copy()
    damaged[-100_000:] = 7
    before = set(user_folder().glob(f"{run_id()}-*"))
    with pytest.raises(ValueError, match="a was damaged"):
        SharedWeights.of_bytes(damaged)
    assert set(user_folder().glob(f"{run_id()}-*")) == before


def test_weights_that_were_handed_over_outlive_their_writer() -> None:
    written = SharedWeights([("a", torch.ones(3))])
    adopted = SharedWeights.adopt(str(written.path))
    # The writer holds its file by the folder: an open file would keep removed weights in memory.
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(written.path))]
    del written
    remove_abandoned()
    assert [name for name, _ in read_weights(str(adopted.path))] == ["a"]
    (loaded,) = (tensor for _, tensor in read_weights(str(adopted.path)))
    adopted.close()
    assert not adopted.path.exists()
    assert loaded.sum() == 3  # a mapping outlives its file
    with pytest.raises(FileNotFoundError):
        SharedWeights.adopt(str(adopted.path))
