"""What a resumed run notices of changed files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import small_run

from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.train.inputs import NUM_PIECES, PIECE_BYTES, check_inputs, write_inputs


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(2 * NUM_PIECES * PIECE_BYTES))
    (tmp_path / "problems.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (tmp_path / "own_inputs_reward.py").write_text("def score(problem, text): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return small_run(
        policy={"model": str(model)},
        task={"name": None, "path": str(tmp_path / "problems.jsonl")},
        reward={"function": "own_inputs_reward:score"},
    )


def scale(path: Path) -> None:
    path.write_bytes(b"\1" * path.stat().st_size)


def append(path: Path) -> None:
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("model/model.safetensors", scale, "policy.model"),
        ("model/config.json", append, "policy.model"),
        ("model/config.json", Path.unlink, "policy.model"),
        ("problems.jsonl", append, "task.path"),
        ("own_inputs_reward.py", append, "reward.function"),
    ],
)
def test_changed_files_are_refused_by_the_setting_that_names_them(
    tmp_path: Path, config: TrainConfig, name: str, change: Callable[[Path], None], key: str
) -> None:
    check_inputs(tmp_path, config)  # an earlier version wrote nothing down
    write_inputs(tmp_path, config)
    check_inputs(tmp_path, config)
    change(tmp_path / name)
    write_inputs(tmp_path, config)  # does not forget what the run started with
    with pytest.raises(ConfigError, match=rf"{key}: its files have changed.*inputs\.json"):
        check_inputs(tmp_path, config)
    (tmp_path / "inputs.json").unlink()
    check_inputs(tmp_path, config)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_damaged_list_of_inputs_is_refused(
    tmp_path: Path, config: TrainConfig, content: str
) -> None:
    (tmp_path / "inputs.json").write_text(content)
    with pytest.raises(ConfigError, match=r"inputs\.json .*; remove it"):
        check_inputs(tmp_path, config)
