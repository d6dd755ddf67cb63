"""The thread that stores captured samples: what waits, and what is dropped."""

from pathlib import Path

import pytest
import torch

from tlt.states import writer
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured

H = 8


def sample(num_tokens: int) -> Captured:
    states = torch.zeros(num_tokens, 4 * H)
    return Captured.of([1, 2], list(range(num_tokens - 2)), states[:, : 3 * H], states[:, 3 * H :])


def test_only_the_window_of_a_long_sample_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = BufferSettings(str(tmp_path), 2**20, max_sample_tokens=32)
    monkeypatch.setattr(writer, "WAITING_BYTES", sample(40).num_bytes)
    stores = writer.StateWriter(SampleBuffer(settings))
    stores.write("long", 0, sample(400))
    stores.drain()
    assert (stores.num_written, stores.num_dropped) == (1, 0)
    (entry,) = stores.buffer.entries()
    assert entry.num_tokens == 32
    monkeypatch.setattr(writer, "WAITING_BYTES", 0)
    stores.write("late", 0, sample(10))
    assert stores.num_dropped == 1
    assert "1 samples were not stored, the last of them late" in caplog.text
