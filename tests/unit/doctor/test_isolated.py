"""One check that fails, crashes or hangs never hides the others, and leaves nothing behind."""

import json
import time
from pathlib import Path

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


def test_a_check_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "STACKS_S", limit(1.0))
    result = isolated.run(acts.hang, Place(tmp_path, 0), limit_s=limit(8.0))
    assert result.status == "timed out"
    assert "in hang" in result.printed
    child = Path("/proc", (tmp_path / "child").read_text())
    deadline_s = time.monotonic() + limit(10)
    while child.exists() and _state(child) != "Z" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.exists() or _state(child) == "Z"


def _state(process: Path) -> str:
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]


def run_checks(out: Path, *checks: Check) -> list[Result]:
    shown: list[Result] = []

    def show(check: Check, result: Result | None) -> None:
        shown.extend([result] if result else [])

    results = report.run_checks(checks, 0, limit(60), out, {"device": "cpu"}, show)
    assert shown == results
    return results


def test_all_results_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MODELS", Check(acts.pass_))
    out = tmp_path / "report.json"
    checks = Check(acts.fail), Check(acts.crash), Check(acts.pass_, min_gpus=1)
    passed, failed, crashed, skipped = run_checks(out, *checks)
    assert passed.notes == {"num_gpus": 0}
    assert failed.error == "AssertionError: two tokens differ"
    assert "doctor_acts.py" in failed.trace
    assert crashed.error == "exit code -6: Only a single TORCH_LIBRARY"
    assert "in crash" in crashed.printed
    assert skipped.error
    written = json.loads(out.read_text())
    assert written["device"] == "cpu"
    statuses = ["passed", "failed", "crashed", "skipped"]
    assert [check["status"] for check in written["checks"]] == statuses
    assert written["verdict"] == "1 checks passed, 2 did not: fail, crash; skipped: pass_"


def test_without_models_no_check_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MODELS", Check(acts.fail))
    results = run_checks(tmp_path / "out", Check(acts.pass_))
    assert [result.status for result in results] == ["failed", "skipped"]
