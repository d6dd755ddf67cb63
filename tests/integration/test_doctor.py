"""The checks of `tlt doctor --gpu`, on CPU engines; and that they find faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speed import limit
from tlt.doctor.engines import Place
from tlt.doctor.report import CHECKS, Check, chosen

pytestmark = pytest.mark.vllm

LIMIT_S = limit(300.0)
ON_CPU = [check for check in CHECKS if not check.min_gpus]


@pytest.fixture(scope="module")
def models(tiny: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "policy").symlink_to(tiny)
    (folder / "drafter").symlink_to(tiny_drafter)
    return folder


@pytest.mark.parametrize("check", ON_CPU, ids=[check.name for check in ON_CPU])
def test_a_cpu_engine_passes(check: Check, models: Path) -> None:
    result = check.run(Place(models, 0), LIMIT_S)
    assert result.status == "passed", f"{result.error}\n{result.trace}\n{result.printed}"
    assert result.notes


def test_a_drafter_that_drafts_nonsense_is_found(
    tiny: Path, fresh_drafter: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy").symlink_to(tiny)
    (tmp_path / "drafter").symlink_to(fresh_drafter)
    (swap,) = chosen(["drafter_swap"])
    result = swap.run(Place(tmp_path, 0), LIMIT_S)
    assert result.status == "failed"


def tlt(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tlt", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=dict(os.environ) | {"COLUMNS": "160"},
        check=False,
    )


def test_the_command_makes_its_models_and_writes_a_report(tmp_path: Path) -> None:
    done = tlt(["doctor", "--gpu", "--device", "cpu", "--only", "start"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "tlt-doctor.json").read_text())
    assert written["provenance"]["versions"]["torch"]
    assert written["findings"]
    start = written["checks"][1]
    assert start["status"] == "passed"
    assert start["notes"]["report"]["plugin"] is True


@pytest.mark.gate
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    done = tlt(["doctor", "--gpu"], tmp_path)
    assert done.returncode == 2
    assert "--gpu" in done.stderr
    assert not (tmp_path / "tlt-doctor.json").exists()
