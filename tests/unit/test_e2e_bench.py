"""benchmarks/e2e: ratios, scenarios, and turns of runs that train nothing."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config.load import load_config
from tlt.config.train import TrainConfig
from tlt.observe.record import MetricsLog, StepLog
from tlt.observe.timeline import StepTimeline, TimelineLog
from tlt.spans import Span
from tlt.train.folder import RunFolder

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "e2e")]

pairs, run, scenario, steps, turns = map(
    importlib.import_module, ("pairs", "run", "scenario", "steps", "turns")
)
registry = importlib.import_module("registry.pairs")


def turn(arm: str, step: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        **{"group": 0, "step": step, "arm": arm, "turn_s": seconds, "cores": 2, "attempts": 1},
        **{
            "waiting_cpu_s": {},
            "other_cpu_s": 0.0,
            "steal_s": 0.0,
            "metrics": {},
            "samples": f"{step}",
        },
        **{"end_to_end_s": seconds, "rollout_s": seconds / 2, "output_tokens": 10},
        **changes,
    }


# --- ratios -------------------------------------------------------------------------------------


def test_every_arm_is_first_equally_often() -> None:
    assert [pairs.order(["a", "b"], step) for step in (1, 2, 3)] == [
        *(["b", "a"], ["a", "b"], ["b", "a"])
    ]
    first = [pairs.order(["a", "b", "c"], step)[0] for step in range(6)]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]


def test_the_reference_runs_beside_every_group() -> None:
    arms = ["off", "a", "b", "c"]
    assert pairs.groups(arms, "off", 4) == [arms]
    assert pairs.groups(arms, "off", 2) == [["off", "a"], ["off", "b"], ["off", "c"]]
    assert pairs.groups(arms, "off", 3) == [["off", "a", "b"], ["off", "c"]]
    with pytest.raises(ValueError, match="at_once = 1"):
        pairs.groups(arms, "off", 1)


def test_drift_that_both_arms_share_cancels() -> None:
    rng = random.Random(0)
    drift = [rng.uniform(1, 2) for _ in range(20)]
    found = pairs.speed_up([(10 * d * rng.gauss(1, 0.03), 8 * d) for d in drift])
    assert found["median_low"] < 1.25 < found["median_high"]
    assert found["median_high"] - found["median_low"] < 0.1


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=30))
def test_equal_seconds_are_no_speed_up(seconds: list[float]) -> None:
    found = pairs.speed_up([(each, each) for each in seconds], 20)
    assert set(found.values()) == {1.0}


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(100):
        noisy = [(rng.gauss(1, 0.05), rng.gauss(1, 0.05)) for _ in range(20)]
        found = pairs.speed_up(noisy, 200)
        covered += found["median_low"] <= 1 <= found["median_high"]
    assert covered >= 90


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, []),
        ({"attempts": 2}, ["aborted"]),
        ({"metrics": {"rollout/engine_restarts": 1}}, ["aborted"]),
        ({"waiting_cpu_s": {"off": 3.0}}, ["waiting arm busy"]),
        ({"other_cpu_s": 3.0}, ["other processes busy"]),
        ({"steal_s": 3.0}, ["cores stolen"]),
    ],
)
def test_marked_pairs_do_not_count(changes: dict[str, Any], why: list[str]) -> None:
    spoilt = turn("tlt", 3, 10.0, **changes)
    assert pairs.marks(spoilt) == why
    off = [turn("off", step, 20.0) for step in range(1, 8)]
    tlt = [turn("tlt", step, 10.0) for step in (1, 2, 4, 5, 6, 7)]
    found = pairs.compare([*off, *tlt, spoilt], "tlt", "off", warm_up=1)
    assert found["left_out"] == ({3: why} if why else {})
    assert found["pairs"] == 6 - bool(why)
    assert found["end_to_end"]["median"] == 2.0
    assert found["rollout_per_token"]["thirds"] == [2.0, 2.0, 2.0]


def test_warm_up_is_left_out_and_other_samples_are_told() -> None:
    off = [turn("off", step, 20.0) for step in (1, 2, 3)]
    tlt = [turn("tlt", 1, 80.0), turn("tlt", 2, 10.0), turn("tlt", 3, 10.0, samples="other")]
    found = pairs.compare(off + tlt, "tlt", "off", warm_up=1)
    assert found["end_to_end"]["total"] == 2.0
    assert (found["same_samples"], found["first_difference"]) == (False, 3)


def test_pairs_stay_within_their_group() -> None:
    first = [turn("off", 1, 20.0), turn("a", 1, 10.0)]
    second = [turn("off", 1, 40.0, group=1), turn("b", 1, 10.0, group=1)]
    assert pairs.pairs(first + second, "b", "off") == [tuple(second)]


# --- scenarios and records ----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(scenario.SCENARIOS.glob("*.toml")), ids=lambda p: p.stem)
def test_the_runs_of_every_scenario_load(path: Path) -> None:
    found = scenario.load(path.stem)
    assert found.reference in found.arms
    assert found.about
    for arm in found.arms.values():
        load_config(TrainConfig, ROOT / found.config, [*found.overrides, *arm.overrides])


def test_arms_and_steps_of_a_scenario_can_be_chosen() -> None:
    found = scenario.load("tiny", ["learner.lr=1e-5"], ["tlt", "off"], 4)
    assert (found.reference, list(found.arms), found.num_steps) == ("tlt", ["tlt", "off"], 5)
    assert found.overrides[-1] == "learner.lr=1e-5"
    with pytest.raises(SystemExit, match="has no arm on; it has off"):
        scenario.load("tiny", arms=["on"])
    with pytest.raises(SystemExit, match="give a path, or one of beyond, epochs, equal"):
        scenario.load("tall")


def test_engine_steps_by_arm_and_batch_size() -> None:
    rows = {
        "engine-0": [
            Span("generating", 0.0, 1.0, running=4, arm="off", tokens=40),
            Span("generating", 1.0, 2.0, running=3, arm="off", tokens=30),
            Span(
                "generating", 2.0, 3.0, running=1, arm="eagle3x3", tokens=30, drafts=10, accepted=20
            ),
        ],
        "engine-1": [Span("training", 0.0, 1.5), Span("idle", 1.5, 2.0)],
        "learner": [Span("training", 0.0, 3.0)],
    }
    timeline = StepTimeline(1, 0.0, 3.0, [], rows)
    found = {(row["arm"], row["batch_up_to"]): row for row in steps.decoding(timeline)}
    assert {key: row["engine_steps"] for key, row in found.items()} == {
        **{("off", 4): 20.0, ("eagle3x3", 1): 10.0}
    }
    assert steps.leases(timeline) == {"engine-1": [1.5]}


def made_run(out: Path, response: str) -> None:
    """Write what a run keeps of its first RL step."""
    folder = RunFolder(out)
    folder.path.mkdir(parents=True)
    folder.write_samples(1, [{"response": response, "num_tokens": 3}])
    StepLog(folder.lengths).append({"step": 1, "tokens": [3]})
    seconds = {"step": 10.0, "rollout": 5.0, "eval": 2.0, "checkpoint": 1.0}
    times = {f"time/{stage}_s": each for stage, each in seconds.items()}
    MetricsLog(folder.metrics).append({"step": 1, "rollout/output_tokens": 3, **times})
    log = TimelineLog(folder.timeline, ["engine-0"])
    log.rewind(-1)
    spans = [Span("generating", 0.0, 5.0, running=1, arm="off", tokens=3)]
    log.append(StepTimeline(1, 0.0, 10.0, [("rollout", 0.0, 5.0)], {"engine-0": spans}))


def test_the_record_of_an_rl_step(tmp_path: Path) -> None:
    made_run(tmp_path / "a", "yes")
    made_run(tmp_path / "b", "no")
    found = steps.record(tmp_path / "a", 1)
    assert found["end_to_end_s"] == 7  # without evaluation and checkpoint
    assert (found["rollout_s"], found["output_tokens"], found["lengths"]) == (5, 3, [3])
    assert found["decoding"][0]["engine_steps"] == 3
    assert found["metrics"]["time/eval_s"] == 2
    assert found["samples"] != steps.record(tmp_path / "b", 1)["samples"]


def test_a_digest_of_the_policy_that_a_run_left(tmp_path: Path) -> None:
    for run_name, weights in {"a": b"xy", "b": b"xy", "c": b"xz"}.items():
        (tmp_path / run_name / "policy").mkdir(parents=True)
        (tmp_path / run_name / "policy" / "model.safetensors").write_bytes(weights)
    a, b, c = (steps.policy(tmp_path / name) for name in "abc")
    assert a == b != c


def test_a_complete_group_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    of = scenario.load("tiny")
    first = run.Comparison("tiny", of, anew=False)
    first.groups = [
        {"arms": ["off", "again"], "complete": False},
        {"arms": ["off", "tlt"], "complete": True, "policy": {"off": "a", "tlt": "b"}},
    ]
    for group in (0, 1):
        for step in (1, 2, 3):
            first.turns += [turn("off", step, 2.0, group=group)]
            first.turns += [turn(first.groups[group]["arms"][1], step, 1.0, group=group)]
    first.write()
    table = registry.speed_ups(json.loads((tmp_path / "tiny.json").read_text()))
    assert table[0][:2] == ["against no speculation", "end to end"]
    assert table[2][:2] == ["TLT from nothing", "2.00x (2.00 to 2.00)"]
    assert table[2][4:6] == ["2", "0"]
    assert [row[-2:] for row in table[1:]] == [["the same", ""], ["the same", "another"]]
    again = run.Comparison("tiny", of, anew=False)
    assert again.has(["off", "tlt"])
    assert not again.has(["off", "again"])
    assert again.speed_ups()["tlt"]["end_to_end"]["median"] == 2.0
    assert "again" not in again.speed_ups()
    other = run.Comparison("tiny", scenario.load("tiny", arms=["off", "again"]), anew=False)
    assert list(other.speed_ups()) == ["tlt"], "arms that were measured stay beside new ones"
    assert not other.has(["off", "again"])
    assert not run.Comparison("tiny", of, anew=True).groups
    assert not run.Comparison("tiny", scenario.load("tiny", steps=3), anew=False).groups


# --- turns --------------------------------------------------------------------------------------

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
        gate = tmp_path / f"gate-{arm}"
        runs.append(turns.Run(arm, command, tmp_path / "runs" / arm, gate, {}))
        runs[-1].wait_at_gate()
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


def test_runs_take_turns_and_only_one_works(started: Any) -> None:
    plan = [(1, 0.15), (2, 0.15), (3, 0.0)]
    runs = [started("a", plan), started("b", plan)]
    arms = turns.Arms(runs)
    for step in (1, 2):
        for arm in ("a", "b"):
            found = arms.turn(arm, step)
            assert found["attempts"] == 1
            assert 0.1 < found["cpu_s"] < 0.6
            assert max(found["waiting_cpu_s"].values()) < 0.05
            assert found["turn_s"] > 0.12
    for run in runs:
        run.go()
        run.finish()


def test_an_rl_step_that_is_taken_again_is_told(started: Any) -> None:
    run = started("a", [(1, 0.0), (2, 0.0), (1, 0.0), (2, 0.0), (3, 0.0)])
    arms = turns.Arms([run])
    assert arms.turn("a", 1)["attempts"] == 1
    assert arms.turn("a", 2)["attempts"] == 2  # after RL step 1, which the run went back to


def test_a_run_that_ends_early_is_told(started: Any) -> None:
    arms = turns.Arms([started("a", [(1, 0.0)])])
    with pytest.raises(turns.RunEnded, match=r"the run of a ended; see .*a\.log"):
        arms.turn("a", 1)
