"""`tlt doctor` prints findings as they must be typed, and the report of a GPU as JSON."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import tlt

from tlt.doctor import machine, report
from tlt.doctor.machine import Finding


def test_findings_as_text_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "pip install 'tlt-rl[cpu]' (or [gpu])"  # no markup
    found = [Finding("ok", "Python", "3.11"), Finding("bad", "Ray", "none", fix)]
    monkeypatch.setattr(machine, "findings", lambda: found)
    code, output, _ = tlt("doctor")
    assert code == 1
    assert fix in output
    code, output, _ = tlt("doctor", "--json")
    assert code == 1
    data = json.loads(output)
    assert data["to_fix"] == 1
    assert data["findings"][1] == {"status": "bad", "what": "Ray", "found": "none", "fix": fix}
    del found[1]
    assert tlt("doctor")[0] == 0


def test_the_report_of_a_gpu_is_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "facts", lambda: {"torch": {"devices": ["one"]}})
    monkeypatch.setattr(machine, "findings", lambda: [])

    def run_checks(
        checks: object, num_gpus: int, limit_s: float, out: Path, facts: dict[str, Any], *_: Any
    ) -> list[Any]:
        out.write_text(json.dumps({"facts": facts, "num_gpus": num_gpus}))
        return []

    monkeypatch.setattr(report, "run_checks", run_checks)
    out = tmp_path / "report.json"
    code, output, errors = tlt("doctor", "--gpu", "--json", "--out", str(out))
    assert code == 0, errors
    assert json.loads(output)["num_gpus"] == 1


def test_a_node_whose_torch_sees_no_gpu_gets_a_report_of_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch: dict[str, Any] = {"devices": [], "torch": "2.13.0", "cuda": "13.0", "hip": None}
    facts = {"torch": torch, "nvidia_smi": "NVIDIA-SMI 470"}
    monkeypatch.setattr(machine, "facts", lambda: facts)
    monkeypatch.setattr(machine, "findings", lambda: [])
    out = tmp_path / "report.json"
    code, _, errors = tlt("doctor", "--gpu", "--out", str(out))
    assert code == 2
    assert str(out) in errors
    written = json.loads(out.read_text())
    assert (written["nvidia_smi"], written["checks"]) == ("NVIDIA-SMI 470", [])


@pytest.mark.parametrize(("module", "extra"), [("numpy", "simulate"), ("torch", "cpu,train")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    def missing() -> Iterator[Finding]:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(machine, "findings", missing)
    code, _, errors = tlt("doctor")
    assert code == 2
    assert f"tlt-rl[{extra}]" in errors


SLOW = """
import time
from tlt.cli.main import app
from tlt.doctor import machine

def findings():
    for what in ("Python", "vLLM"):
        time.sleep(0.3)
        yield machine.Finding("ok", what, "3.11")

machine.findings = findings
app(["doctor", *__import__("sys").argv[1:]])
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_only_a_terminal_shows_that_checks_go_on(options: list[str]) -> None:
    command = [sys.executable, "-c", SLOW, *options]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, theirs = os.openpty()
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as shown:
        os.close(theirs)
        assert shown.stdout is not None
        output, errors = shown.stdout.read().decode(), read_all(ours)
    assert output == piped.stdout
    assert "0:00:0" not in piped.stderr
    assert "checking" in errors
    assert "0:00:00" in errors
    if options:
        assert len(json.loads(output)["findings"]) == 2


def read_all(terminal: int) -> str:
    """Return what a program that has ended wrote to its terminal."""
    parts = []
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := os.read(terminal, 4096):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()
