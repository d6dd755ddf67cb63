"""The table of `tlt doctor` shows its commands as they must be typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from called import tlt
from typer.testing import CliRunner

from tlt.cli import diagnosis, doctor
from tlt.cli.diagnosis import Finding, Status
from tlt.cli.main import app


def test_the_extras_of_a_fix_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "pip install 'tlt-rl[cpu]' (or [gpu])"
    missing = [Finding(Status.BAD, "Ray", "none", fix)]
    monkeypatch.setattr(doctor, "_diagnose", lambda console: missing)
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert fix in done.stdout


def test_a_busy_machine_is_not_told_to_install_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_S", 0.01)
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: name)
    (found,) = [each for each in diagnosis.diagnose() if each.what == "vLLM import"]
    assert found.status == Status.BAD
    assert "busy" in found.fix
    assert "install" not in found.fix


def test_the_report_of_a_gpu_is_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"devices": [{"name": "none"}]}
    monkeypatch.setattr("tlt.doctor.machine.probe", lambda: found)
    monkeypatch.setattr(doctor, "_diagnose", lambda console: [])

    def run_checks(
        checks: object, num_gpus: int, limit_s: float, out: Path, facts: dict[str, Any], *_: Any,
        **__: Any,
    ) -> list[Any]:  # fmt: skip
        out.write_text(json.dumps({"facts": facts, "num_gpus": num_gpus}))
        return []

    monkeypatch.setattr("tlt.doctor.report.run_checks", run_checks)
    out = tmp_path / "report.json"
    code, output, errors = tlt("doctor", "--gpu", "--json", "--out", str(out))
    assert code == 0, errors
    assert json.loads(output)["num_gpus"] == 1


@pytest.mark.parametrize(("module", "extra"), [("numpy", "simulate"), ("torch", "cpu,train")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    def missing(console: object) -> list[Finding]:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(doctor, "_diagnose", missing)
    code, _, errors = tlt("doctor")
    assert code == 2
    assert f"this command needs {module}; run: pip install 'tlt-rl[{extra}]'" in errors
