"""The examples that need no engine run as a reader runs them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN_TASK = ROOT / "examples" / "own_task"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the task's folder with a tiny model in it."""
    from tlt.models import tiny

    folder = tmp_path_factory.mktemp("examples") / "own_task"
    shutil.copytree(OWN_TASK, folder)
    tiny.make(folder / "models" / "tiny")
    return folder


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_task_of_ones_own_passes_the_check(folder: Path) -> None:
    assert "200 problems" in printed(["make_problems.py"], folder)
    # One engine: tests that run side by side have a core each.
    check = ["-m", "tlt", "train", "run.toml", "--check", "pool.num_engines=1"]
    assert "ok run.toml: 20 steps" in printed(check, folder)


@pytest.mark.parametrize("function", ["advantage", "baseline"])
def test_an_algorithm_of_ones_own_passes_the_check(folder: Path, function: str) -> None:
    printed(["make_problems.py"], folder)
    ours = [f"algorithm.advantage=reinforce_pp:{function}", "algorithm.advantage_over=step"]
    check = ["-m", "tlt", "train", "run.toml", "--check", "pool.num_engines=1", *ours]
    assert "ok run.toml: 20 steps" in printed(check, folder)


def test_reinforce_pp_normalises_over_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN_TASK))
    import reinforce_pp  # type: ignore[import-not-found]

    groups = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    (right, wrong), none, all_right = reinforce_pp.advantage(groups)
    assert [right, wrong] == pytest.approx([1, -1], abs=1e-5)
    assert (none, all_right) == ([wrong] * 2, [right] * 2), "prompts are not told apart"
    (right, wrong), none, all_right = reinforce_pp.baseline(groups)
    assert [right, wrong] == pytest.approx([3**0.5, -(3**0.5)], abs=1e-4)
    assert (none, all_right) == ([0.0] * 2, [0.0] * 2), "such prompts teach nothing"
    assert reinforce_pp.advantage([[1.0] * 3] * 2) == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "name", ["make_problems.py", "my_rewards.py", "run.toml", "reinforce_pp.py"]
)
def test_the_page_shows_the_files_of_the_example(name: str) -> None:
    page = (ROOT / "docs" / "own.md").read_text()
    assert (OWN_TASK / name).read_text() in page


def test_the_drafters_trainer_runs_alone(folder: Path) -> None:
    script = str(ROOT / "examples" / "drafter_trainer_alone.py")
    options = ["--samples", "32", "--steps", "4", "--out", "drafter"]
    text = printed([script, "models/tiny", *options], folder)
    lengths = re.findall(r"(\d\.\d\d) (?:before|after 4 optimizer steps)", text)
    assert len(lengths) == 2
    assert min(map(float, lengths)) >= 1.0
    assert (folder / "drafter" / "config.json").exists()
