"""Benchmark scripts: what they compute and write, without a long run."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script_files import ROOT, script

from tlt.config.load import load_config
from tlt.config.train import TrainConfig

pytest.importorskip("psutil")
pairs, scenario, turns = (script(f"benchmarks/e2e/{n}.py") for n in ("pairs", "scenario", "turns"))


def turn(arm: str, step: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        **{"group": 0, "step": step, "arm": arm, "turn_s": seconds, "cores": 2, "attempts": 1},
        **{"waiting_cpu_s": {}, "other_cpu_s": 0.0, "steal_s": 0.0, "metrics": {}},
        **{"end_to_end_s": seconds, "rollout_s": seconds / 2, "output_tokens": 10},
        "samples": f"{step}",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, []),
        ({"attempts": 2}, ["aborted"]),
        ({"steal_s": 3.0}, ["cores stolen"]),
    ],
)
def test_speed_ups_are_medians_of_pairs_without_marks(
    changes: dict[str, Any], why: list[str]
) -> None:
    spoilt = turn("tlt", 3, 10.0, **changes)
    off = [turn("off", step, 20.0) for step in range(1, 8)]
    tlt = [turn("tlt", step, 80.0 if step == 1 else 10.0) for step in (1, 2, 4, 5, 6, 7)]
    found = pairs.compare([*off, *tlt, spoilt], "tlt", "off", warm_up=1)
    assert found["left_out"] == ({3: why} if why else {})
    assert found["end_to_end"]["median"] == found["end_to_end"]["total"] == 2.0
    assert found["same_samples"]
    other = pairs.compare([*off, *tlt, spoilt | {"samples": "x"}], "tlt", "off", warm_up=1)
    assert other["first_difference"] == 3


@pytest.mark.parametrize("path", sorted(scenario.SCENARIOS.glob("*.toml")), ids=lambda p: p.stem)
def test_the_runs_of_every_scenario_load(path: Path) -> None:
    found = scenario.load(path.stem)
    assert found.reference in found.arms
    for arm in found.arms.values():
        load_config(TrainConfig, ROOT / found.config, [*found.overrides, *arm.overrides])


RUN = """
import socket, sys, time
settings = dict(each.split("=", 1) for each in sys.argv[1:])
gate = socket.socket(socket.AF_UNIX)
gate.connect(settings["debug.gate"].strip('"'))
for wanted, busy_s in {plan}:
    gate.sendall(f"{{wanted}}\\n".encode())
    assert gate.recv(9) == b"go\\n"
    end = time.process_time() + busy_s
    while time.process_time() < end:
        pass
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    runs = []

    def start(arm: str, plan: list[tuple[int, float]]) -> Any:
        command = [sys.executable, "-c", RUN.format(plan=plan)]
        runs.append(turns.Run(arm, command, tmp_path / "runs" / arm, tmp_path / arm, {}))
        runs[-1].wait_at_gate()
        return runs[-1]

    yield start
    for each in runs:
        each.stop()


def test_runs_take_turns_and_only_one_works(started: Any) -> None:
    arms = turns.Arms([started("a", [(1, 0.15), (2, 0.0)]), started("b", [(1, 0.15)])])
    found = arms.turn("a", 1)
    assert found["attempts"] == 1
    assert 0.1 < found["cpu_s"] < 0.6
    assert found["waiting_cpu_s"]["b"] < 0.05
    with pytest.raises(turns.RunEnded):
        arms.turn("b", 1)


def test_soak_measures_growth_and_reads_whole_lines(tmp_path: Path) -> None:
    soak = script("benchmarks/soak.py")
    assert soak.growth([1, 1, 1, 9, 9, 9, 2, 2, 2], decile=5) == 2.0
    disturbed = soak.soaked(tmp_path, "one")
    assert soak.Faults(disturbed, 0).one() == ""  # nothing runs
    record = {"step": 3, "reward/mean": 0.5, "time/step_s": 1.0, "learner/restarts": 2}
    assert script("benchmarks/runs.py").lasting(record) == {"step": 3, "reward/mean": 0.5}
    disturbed.folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "filler": "x" * 3000}) for step in (1, 2, 3)]
    (disturbed.folder / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
    assert disturbed.last_step() == 2


def test_pairs_of_trl_alternate_and_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = script("benchmarks/trl_pairs.py")
    saved: dict[str, Any] = {}
    monkeypatch.setattr(trl, "run", lambda arguments, without: trl.steps_of("x\nstep reward=0.5\n"))
    monkeypatch.setattr(trl, "save", lambda name, result: saved.update(result))
    monkeypatch.setattr(sys, "argv", ["trl_pairs.py"])
    trl.main()
    assert [pair["first"] for pair in saved["pairs"]] == ["without", "tlt"]
    assert saved["pairs"][0]["tlt"] == [{"reward": 0.5}]


def test_the_campaign_of_faults_reads_pytest_and_finds_its_tests() -> None:
    faults = script("benchmarks/faults.py")
    assert faults.outcome("FAILED\n1 failed, 39 passed in 242.69s") == {"passed": 39, "failed": 1}
    for folder, *_ in faults.LAYERS.values():
        assert (ROOT / "tests" / "unit" / folder / "test_fault_layer.py").exists()
