"""benchmarks/soak.py: what it measures and compares, without a run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

soak = importlib.import_module("soak")


def test_growth_compares_the_last_third_with_the_first() -> None:
    assert soak.growth([5.0] * 9, decile=5) == 1.0
    assert soak.growth([1, 1, 1, 9, 9, 9, 2, 2, 2], decile=5) == 2.0
    assert soak.growth([0.0] * 6, decile=5) == 0.0
    assert soak.growth([0, 0, 0, 0, 3, 3], decile=5) == 1.0


def test_growth_of_the_ninth_decile_tells_what_a_whole_run_uses() -> None:
    starting_often_at_first = [*[1, 1, 8] * 5, *[8] * 10, *[1, 8, 8] * 5]
    assert soak.growth(starting_often_at_first, decile=5) == 8.0
    assert soak.growth(starting_often_at_first, decile=9) == 1.0


def test_the_last_step_is_read_from_whole_lines(tmp_path: Path) -> None:
    run = soak.Run(tmp_path, "one")
    assert run.last_step() == 0
    run.folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "filler": "x" * 3000}) for step in (1, 2, 3)]
    path = run.folder / "metrics.jsonl"
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
    assert run.last_step() == 2
    path.write_text("\n".join(lines) + "\n")
    assert run.last_step() == 3
    assert [record["step"] for record in run.records()] == [1, 2, 3]


def test_time_and_restarts_are_not_compared() -> None:
    record = {"step": 3, "reward/mean": 0.5, "time/step_s": 1.0, "learner/restarts": 2}
    assert soak.lasting(record) == {"step": 3, "reward/mean": 0.5}


def test_without_a_run_no_fault_is_possible(tmp_path: Path) -> None:
    faults = soak.Faults(soak.Run(tmp_path, "none"), 0)
    assert len(faults.kinds) == 12
    assert faults.one() == ""


def test_the_recipe_names_the_commands_that_make_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(soak.subprocess, "run", lambda command, **_: made.append(command[3:]))
    soak.make_policy(tmp_path)
    assert [command[0] for command in made] == ["models", "sft"]
    assert "max_value=9" in made[1]
    assert not any("\\" in word for command in made for word in command)
