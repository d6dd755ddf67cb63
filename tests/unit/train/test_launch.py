"""What a run makes for itself when it starts."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from drafter_fixtures import captured

from tlt.config.load import load_config, read_toml
from tlt.config.train import CaptureConfig, TrainConfig
from tlt.node.shared import RUN_ID, begin_run, user_folder
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.train import launch

CONFIGS = Path(__file__).parents[3] / "configs"


class Started(Exception):
    """The run has passed its checks and its settings are written."""


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        (["engine.num_gpus=1", "learner.num_gpus=1"], 7),
        (["engine.num_gpus=1", "learner.num_gpus=1", "tlt.num_draft_tokens=5"], 5),
        ([], 4),
    ],
)
def test_the_settings_of_a_run_say_how_deep_its_drafters_are_trained(
    settings: list[str], trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tlt drafter export` reads it there."""
    monkeypatch.setenv(RUN_ID, "")
    monkeypatch.setattr(launch, "prepare", lambda config: None)

    def start_ray(num_engines: int) -> None:
        raise Started

    monkeypatch.setattr(launch, "start_ray", start_ray)
    folder = tmp_path / "policy"
    folder.mkdir()
    own = [f"policy.model={folder}", f"run.out={tmp_path / 'run'}", "tlt.enabled=true", *settings]
    config = load_config(TrainConfig, CONFIGS / "tiny_tail_cpu.toml", own)
    with pytest.raises(Started):
        launch.launch(config, False, "tlt train", lambda *_: None, lambda _: None)
    assert read_toml(tmp_path / "run" / "config.toml")["tlt"]["num_draft_tokens"] == trained


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
