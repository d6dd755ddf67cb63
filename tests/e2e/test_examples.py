"""The examples that need engines run as a reader runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import records, tlt
from speed import limit

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.two_cores]


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plug_in_runs_alone(tmp_path: Path) -> None:
    tlt("models tiny --out models/tiny", tmp_path)
    text = printed([str(ROOT / "examples" / "plugin_alone.py"), "models/tiny"], tmp_path)
    assert "plug-in active: True, faults: []" in text
    assert re.search(r"acceptance length \d\.\d\d", text)


@pytest.mark.ray
def test_a_task_of_ones_own_trains(tmp_path: Path) -> None:
    folder = tmp_path / "own_task"
    shutil.copytree(ROOT / "examples" / "own_task", folder)
    tlt("models tiny --out models/tiny", folder)
    printed(["make_problems.py"], folder)
    tlt("train run.toml run.num_steps=2 eval.every_steps=0", folder)
    steps = records(folder / "runs" / "letters")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["reward/mean"] > 0 for record in steps)
