"""One check that fails, crashes or hangs never hides the others, and leaves nothing behind."""

import json
import subprocess
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


def test_the_report_holds_the_logs_of_a_run(tmp_path: Path) -> None:
    result = isolated.run(acts.fail_in_a_run, Place(tmp_path, 0), limit_s=limit(60))
    assert result.error == "AssertionError: tlt train ended with code 1"
    for line in ("tlt train says why", "the driver gave up", "illegal memory access"):
        assert line in result.printed


def test_a_process_that_a_broken_driver_keeps_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        pid = 2**30

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "waits for ever"
            raise subprocess.TimeoutExpired("check", timeout)

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(isolated, "STACKS_S", 0.0)
    assert isolated.run(acts.pass_, Place(tmp_path, 0), limit_s=1).status == "timed out"


def test_all_checks_run_within_an_hour_however_many_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, out = 100.0, tmp_path / "report.json"
    limits: list[float] = []

    def hang(function: Callable[..., Any], *_: Any, limit_s: float, **__: Any) -> Result:
        nonlocal now_s
        assert json.loads(out.read_text())["device"] == "cuda"  # from the start
        now_s += limit_s if limits else 5.0
        limits.append(limit_s)
        return Result(function.__name__, "", "timed out" if limits[1:] else "passed")

    monkeypatch.setattr(isolated, "run", hang)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    results = report.run_checks(
        report.CHECKS, 8, 600.0, out, {"device": "cuda"}, lambda check, result: None
    )
    assert [result.name for result in results[1:]] == [check.name for check in report.CHECKS]
    assert limits[:3] == [600.0] * 3
    assert min(limits) >= report.LEAST_S
    assert now_s - 100 <= report.ALL_S
