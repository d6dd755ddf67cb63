"""Every command that prints a table prints it as JSON, too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import tlt
from made_up import made_up_folder
from typer.main import get_command

from tlt.cli.main import app
from tlt.cli.output import Output

WITHOUT_TABLE = {"models smollm2", "models tiny", "models words", "drafter export"}
"""Commands that only say which files they wrote."""
ARMS = (
    *(("off", 2.0, 16, 600, 0), ("off", 2.0, 8, 300, 0), ("off", 1.0, 4, 120, 0)),
    *(("ngram:3", 1.0, 4, 300, 150), ("eagle3:4", 2.0, 2, 400, 250), ("off", 1.0, 2, 60, 0)),
    *(("eagle3:4", 1.0, 1, 200, 120), ("off", 1.0, 1, 40, 0)),
)


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield name.strip(), command
        return
    for each, of in inside.items():
        yield from commands(of, f"{name} {each}")


def test_every_command_with_a_table_has_the_option() -> None:
    found = {
        name
        for name, command in commands(get_command(app))
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert found == WITHOUT_TABLE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return made_up_folder(
        tmp_path / "run", arms=ARMS, learner__tokens=800.0, prompt__mean_tokens=50.0
    )


def test_a_calibration(folder: Path) -> None:
    code, output, errors = tlt("simulate", "calibrate", str(folder), "--json")
    assert code == 0, errors
    assert json.loads(output) == json.loads(Path("calibration.json").read_text())


def test_the_findings_of_a_run(folder: Path) -> None:
    code, output, _ = tlt("doctor", "--run", str(folder), "--json")
    assert code == 0
    assert json.loads(output)["findings"][0]["change"]


def test_what_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).result({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}


def test_lines_and_tables_are_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        output = Output(as_json)
        output.table("[title]", ("|name", ">number"), [["[/]", "1"]])
        output.wrote("[/]")
        output.note("[/]")
        shown = capsys.readouterr()
        assert shown.out.count("[/]") == (0 if as_json else 3)
        assert shown.err.count("[/]") == (1 if as_json else 0)
