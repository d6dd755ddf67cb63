"""The benchmark of TRL's trainer: runs alternate, and its result is written."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINE = "step reward=0.5 step_time=8.0 tlt/generation_s={} tlt/drafter_version={}"


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("trl_pairs")


def test_pairs_alternate_and_are_written(
    pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bool] = []

    def run(arguments: list[str], without: bool) -> Any:
        assert arguments[arguments.index("--steps") + 1] == "2"
        order.append(without)
        line = LINE.format(*((4.0, 0) if without else (2.0, 1)))
        drafted = "" if without else " tlt/acceptance_length=2.5"
        return pairs.steps_of(f"noise\n{line}\n{line}{drafted}\n")

    monkeypatch.setattr(pairs, "run", run)
    pairs.main(["--steps", "2", "--out", str(tmp_path / "trl_pairs.json")])
    assert order == [True, False, False, True]
    found = json.loads((tmp_path / "trl_pairs.json").read_text())
    assert [pair["first"] for pair in found["pairs"]] == ["without", "tlt"]
    assert found["pairs"][0]["tlt"][1]["tlt/acceptance_length"] == 2.5


def test_no_pair_begins_that_would_end_too_late(
    pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "run", lambda arguments, without: [{"reward": 0.5}])
    pairs.main(["--minutes", "0", "--out", str(tmp_path / "result.json")])
    assert len(json.loads((tmp_path / "result.json").read_text())["pairs"]) == 1
