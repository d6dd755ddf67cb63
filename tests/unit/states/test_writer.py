"""The threads that store captured samples: what waits, and what is dropped."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from speed import limit
from tlt.states import buffer as buffer_module
from tlt.states import writer
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured

H = 8
WAIT_S = limit(10.0)


def sample(num_tokens: int) -> Captured:
    states = torch.zeros(num_tokens, 4 * H)
    return Captured.of([1, 2], list(range(num_tokens - 2)), states[:, : 3 * H], states[:, 3 * H :])


def new_writer(folder: Path, max_sample_tokens: int = 512) -> writer.StateWriter:
    return writer.StateWriter(SampleBuffer(BufferSettings(str(folder), 2**20, max_sample_tokens)))


def test_only_the_window_of_a_long_sample_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "WAITING_BYTES", sample(40).num_bytes)
    stores = new_writer(tmp_path, max_sample_tokens=32)
    stores.write("long", 0, sample(400))
    stores.drain()
    assert (stores.num_written, stores.num_dropped) == (1, 0)
    (entry,) = stores.buffer.entries()
    assert entry.num_tokens == 32
    monkeypatch.setattr(writer, "WAITING_BYTES", 0)
    stores.write("late", 0, sample(10))
    assert stores.num_dropped == 1
    assert "late" in caplog.text


def test_several_samples_are_written_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every writer waits within its write until all of them are there."""
    meeting = threading.Barrier(writer.NUM_THREADS)
    write = buffer_module._write

    def waiting(*args: Any) -> None:
        meeting.wait(WAIT_S)
        write(*args)

    monkeypatch.setattr(buffer_module, "_write", waiting)
    stores = new_writer(tmp_path)
    for index in range(2 * writer.NUM_THREADS):
        stores.write(str(index), 0, sample(20 + index))
    stores.drain()
    assert stores.stored() == writer.Stored(
        2 * writer.NUM_THREADS, 0, sum(path.stat().st_size for path in tmp_path.iterdir())
    )
    assert {e.num_tokens for e in stores.buffer.entries()} == {*range(20, 28)}
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == [".lock"]


def test_a_failed_write_leaves_nothing_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(buffer_module, "_write", fail)
    stores = new_writer(tmp_path)
    stores.write("a", 0, sample(20))
    stores.drain()
    stores.missing("b")
    assert stores.stored() == writer.Stored(0, 2, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_writers_at_work_keep_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written counts, and another writer neither removes nor exceeds it."""
    one = sample(100)
    capacity = int(2.5 * (one.num_bytes / 2 + buffer_module.HEADER_BYTES))  # in bfloat16
    store = SampleBuffer(BufferSettings(str(tmp_path), capacity, 512))
    write = buffer_module._write
    others = {"second": False, "third": True}
    waiting = list(others)

    def writing(*args: Any) -> None:
        if waiting:  # a write within a write
            name = waiting.pop(0)
            others[name] = store.put(name, 0, one)
        assert store.num_bytes() <= capacity
        write(*args)

    monkeypatch.setattr(buffer_module, "_write", writing)
    assert store.put("first", 0, one)
    assert others == {"second": True, "third": False}, "there is no room for three"
    assert len(store.entries()) == 2
