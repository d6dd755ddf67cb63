"""The examples that need engines run as a reader runs them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, records, tlt
from speed import limit

EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.two_cores]


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plug_in_runs_alone(tmp_path: Path) -> None:
    tlt("models tiny --out models/tiny", tmp_path)
    text = printed([str(EXAMPLES / "plugin_alone.py"), "models/tiny"], tmp_path)
    assert "plug-in active: True, faults: []" in text
    assert re.search(r"acceptance length \d\.\d\d", text)


@pytest.mark.ray
def test_a_task_of_ones_own_trains(tmp_path: Path) -> None:
    folder = tmp_path / "own_task"
    shutil.copytree(EXAMPLES / "own_task", folder)
    tlt("models tiny --out models/tiny", folder)
    printed(["make_problems.py"], folder)
    tlt("train run.toml run.num_steps=2 eval.every_steps=0", folder)
    steps = records(folder / "runs" / "letters")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["reward/mean"] > 0 for record in steps)


@pytest.mark.ray
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, cell in enumerate(
            json.loads((EXAMPLES / "one_run.ipynb").read_text())["cells"]
        ):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    text = said.getvalue()
    assert len(re.findall(r"^ +[1-4] +\d+\.\d", text, re.M)) >= 4, text
    assert (tmp_path / "runs" / "one" / "report.html").exists()
