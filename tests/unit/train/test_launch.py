"""What a run makes for itself when it starts."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from drafter_fixtures import captured

from tlt.config.load import load_config
from tlt.config.train import TrainConfig
from tlt.node.shared import RUN_ID, begin_run, user_folder
from tlt.states.buffer import BufferSettings, SampleBuffer

CONFIGS = Path(__file__).parents[3] / "configs"


def test_two_runs_with_one_out_never_share_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers mount different disks at one path, and share /dev/shm."""
    monkeypatch.setenv(RUN_ID, "")  # restored afterwards
    recipe = next(iter(sorted(CONFIGS.glob("*.toml"))))
    overrides = [f"capture.folder={tmp_path}", "capture.capacity_gib=0.01", "run.out=runs/same"]
    config = load_config(TrainConfig, recipe, overrides)
    buffers = []
    for _ in range(2):
        begin_run(config.run.out)
        settings = BufferSettings.of(config.capture)
        assert Path(settings.folder).parent == user_folder(tmp_path)
        buffers.append(SampleBuffer(settings))
    first, second = buffers
    first.put("a", 1, captured(12, num_prompt=5))
    second.restore_from(None)  # as every run does at its start
    assert len(first.entries()) == 1
    assert second.entries() == []
