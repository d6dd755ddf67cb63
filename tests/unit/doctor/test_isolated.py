"""One check that fails, crashes or hangs never hides the others, and leaves nothing behind."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import doctor_acts as acts
from speed import limit
from tlt.doctor import isolated, report
from tlt.doctor.engines import Place
from tlt.doctor.isolated import Result
from tlt.doctor.report import Check


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(acts.__file__).parent), prepend=":")


def run(act: Callable[[Place], dict[str, Any]], folder: Path, limit_s: float = 60.0) -> Result:
    return isolated.run(act, Place(folder, 0), limit_s=limit(limit_s))


def test_an_error_comes_with_its_traceback(tmp_path: Path) -> None:
    result = run(acts.fail, tmp_path)
    assert result.status == "failed"
    assert result.error == "AssertionError: two tokens differ"
    assert "doctor_acts.py" in result.trace


def test_a_crash_comes_with_its_cause_and_the_stack(tmp_path: Path) -> None:
    result = run(acts.crash, tmp_path)
    assert result.status == "crashed"
    assert result.error == "exit code -6: Only a single TORCH_LIBRARY"
    assert "in crash" in result.printed


def test_a_check_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "STACKS_S", limit(1.0))
    result = run(acts.hang, tmp_path, limit_s=4.0)
    assert result.status == "timed out"
    assert "in hang" in result.printed
    child = Path("/proc", (tmp_path / "child").read_text())
    deadline_s = time.monotonic() + limit(10)
    while child.exists() and _state(child) != "Z" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.exists() or _state(child) == "Z"


def _state(process: Path) -> str:
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]


def test_all_results_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MODELS", Check(acts.pass_))
    checks = [Check(acts.fail), Check(acts.crash), Check(acts.pass_, min_gpus=1)]
    out = tmp_path / "report.json"
    shown: list[str] = []

    def show(check: Check, result: Result | None) -> None:
        shown.append("begins" if result is None else result.status)

    results = report.run_checks(checks, 0, limit(60), out, {"device": "cpu"}, show)
    statuses = ["passed", "failed", "crashed", "skipped"]
    assert [result.status for result in results] == statuses
    assert results[0].notes == {"num_gpus": 0}
    assert shown == [word for status in statuses for word in ("begins", status)]
    written = json.loads(out.read_text())
    assert written["device"] == "cpu"
    assert [check["status"] for check in written["checks"]] == statuses
    assert written["verdict"] == "1 checks passed, 2 did not: fail, crash; skipped: pass_"


def test_without_models_no_check_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MODELS", Check(acts.fail))
    results = report.run_checks(
        [Check(acts.pass_)], 0, limit(60), tmp_path / "out", {}, lambda *_: None
    )
    assert [result.status for result in results] == ["failed", "skipped"]
