"""What a run makes for itself when it starts."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from drafter_fixtures import captured

from tlt.config.train import CaptureConfig
from tlt.node.shared import RUN_ID, begin_run, user_folder
from tlt.states.buffer import BufferSettings, SampleBuffer


def test_two_runs_with_one_out_never_share_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers mount different disks at one path, and share /dev/shm."""
    monkeypatch.setenv(RUN_ID, "")  # restored afterwards
    capture = CaptureConfig(folder=str(tmp_path), capacity_gib=0.01)
    buffers = []
    for _ in range(2):
        begin_run("runs/same")
        settings = BufferSettings.of_run(capture)
        assert Path(settings.folder).parent == user_folder(tmp_path)
        buffers.append(SampleBuffer(settings))
    first, second = buffers
    first.put("a", 1, captured(12, num_prompt=5))
    second.restore_from(None)  # as every run does at its start
    assert len(first.entries()) == 1
    assert second.entries() == []
