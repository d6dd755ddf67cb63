"""What readers do: the commands of README and quickstart in order, and the examples."""

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

pytestmark = [pytest.mark.vllm, pytest.mark.two_cores]


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_plug_in_runs_alone(tmp_path: Path) -> None:
    tlt("models tiny --out models/tiny", tmp_path)
    text = printed([str(EXAMPLES / "plugin_alone.py"), "models/tiny"], tmp_path)
    assert "plug-in active: True, faults: []" in text
    assert re.search(r"acceptance length \d\.\d\d", text)


@pytest.fixture
def own_task(tmp_path: Path) -> Path:
    """Return a copy of the example with its model and its problems."""
    folder = tmp_path / "own_task"
    shutil.copytree(EXAMPLES / "own_task", folder)
    tlt("models tiny --out models/tiny", folder)
    printed(["make_problems.py"], folder)
    return folder


@pytest.mark.ray
@pytest.mark.slow
def test_a_task_of_ones_own_trains(own_task: Path) -> None:
    tlt("train run.toml run.num_steps=2 eval.every_steps=0", own_task)
    steps = records(own_task / "runs" / "letters")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["reward/mean"] > 0 for record in steps)


@pytest.mark.ray
@pytest.mark.slow
def test_reinforce_pp_trains(own_task: Path) -> None:
    ours = "algorithm.advantage=reinforce_pp:advantage algorithm.advantage_over=step"
    tlt(f"train run.toml run.num_steps=2 eval.every_steps=0 {ours}", own_task)
    steps = records(own_task / "runs" / "letters")
    assert [record["reward/groups_with_signal_share"] for record in steps] == [1.0, 1.0]
    assert all(record["learner/grad_norm"] > 0 for record in steps)


@pytest.mark.ray
@pytest.mark.slow
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


def commands(page: str) -> list[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    return [line.split("#")[0].strip()[4:] for line in lines if line.startswith("tlt ")]


@pytest.mark.ray
def test_what_readers_type_works(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    # Each command once, in the order in which a reader meets it.
    found = dict.fromkeys([*commands("docs/quickstart.md"), *commands("README.md")])
    assert len(found) >= 6
    for command in found:
        if "tiny_gcd" in command:
            command += " run.num_steps=2"  # test_train.py runs all of it
        if command == "demo":
            command += " --steps 2"  # test_cli.py looks at what it says
        tlt(command, tmp_path)
    assert (tmp_path / "runs" / "tlt" / "report.html").exists()
    compared = json.loads(tlt("report runs/off runs/tlt --json", tmp_path))["comparisons"][0]
    assert compared["steps"] == 10
    assert compared["rollout"]["median"] > 1.0, compared
