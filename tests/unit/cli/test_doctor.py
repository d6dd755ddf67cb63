"""The table of `tlt doctor` shows its commands as they must be typed."""

import pytest
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
