"""The simulator: its clock, its engine model, runs with production strategy and coordinator."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import numpy as np
import pytest

from tlt.config.load import apply_overrides, check
from tlt.contracts import OFF, Arm
from tlt.errors import ConfigError
from tlt.report.view import RunView
from tlt.simulate import clock
from tlt.simulate.answer import contributions, figures, in_words, speed_ups
from tlt.simulate.calibrate import Calibration, learner, training
from tlt.simulate.cluster import Learner, Training
from tlt.simulate.model import Drafting, EngineModel, Observation, fit
from tlt.simulate.pace import Player
from tlt.simulate.plot import plot_simulation, what_if
from tlt.simulate.profiles import DRIFT
from tlt.simulate.rollout import Rollout
from tlt.simulate.scenario import (
    ScenarioConfig,
    cluster_of,
    completed,
    simulate,
)
from tlt.simulate.workload import Workload, read_trace, spread
from tlt.strategy.spec import build_strategy
from tlt.tasks.tail import HeavyTail

ROOT = Path(__file__).parents[3]
ENGINE = EngineModel(step=0.02, row=0.0005, context=1e-7, drafting=0.002, draft_pass=0.001)
DRAFTING = Drafting({"eagle3": (0.8, 0.64, 0.51, 0.41)})


def scenario(*overrides: str) -> ScenarioConfig:
    return check(ScenarioConfig, apply_overrides({}, overrides), "test")


# --- the clock ------------------------------------------------------------------------------------


def test_waiting_takes_no_time() -> None:
    async def work() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return clock.now_s()

    started_s = time.thread_time()
    assert clock.run(work()) == pytest.approx(3660)
    assert time.thread_time() - started_s < 1


def test_waiting_for_nothing_is_noticed() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Stuck):
        clock.run(work())


# --- the model ------------------------------------------------------------------------------------


def test_a_fit_finds_the_parts() -> None:
    rng = random.Random(0)
    found = []
    for arm in (OFF, Arm("eagle3", 2), Arm("eagle3", 6), Arm("ngram", 4)):
        for running in (1, 3, 8, 20):
            for context in (100, 900):
                exact = float(ENGINE.step_s(arm, running, context))
                found.append(Observation(arm, running, context, exact * rng.uniform(0.98, 1.02)))
    model = fit(found)
    for arm in (OFF, Arm("eagle3", 4)):
        for running in (2, 12, 30):
            expected = float(ENGINE.step_s(arm, running, 500))
            assert float(model.step_s(arm, running, 500)) == pytest.approx(expected, rel=0.05)


def test_too_little_to_fit_is_said() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit([Observation(OFF, 1, 100, 0.02)])


def test_expected_tokens() -> None:
    assert DRAFTING.tokens(OFF) == 1
    assert DRAFTING.tokens(Arm("eagle3", 2)) == pytest.approx(1 + 0.8 + 0.64)
    assert DRAFTING.at(2.0).tokens(Arm("eagle3", 1)) == pytest.approx(1 + 0.64)
    beyond = DRAFTING.tokens(Arm("eagle3", 6)) - DRAFTING.tokens(Arm("eagle3", 5))
    assert 0 < beyond < 0.41


# --- the workload ---------------------------------------------------------------------------------


def test_lengths_are_those_of_a_run_with_forced_lengths() -> None:
    sizes = HeavyTail(45, 600, 900)
    theirs = sorted(sizes.spread(4096, random.Random(0)))
    mine = np.sort(spread(sizes, 4096, np.random.default_rng(0)))
    for share in (0.1, 0.5, 0.9, 0.99):
        at = int(share * 4096)
        assert mine[at] == pytest.approx(theirs[at], rel=0.03)


def test_an_engine_takes_as_long_as_its_requests_let_it() -> None:
    # Two requests cost 2 seconds a token, one costs 1.
    rollout = Rollout([10.0, 100.0, 20.0], 2, 8)
    assert (rollout.most, rollout.longest) == (2, [20, 100])
    owner, end_s = rollout.play([0, 1, 2], [0, 0, 0], 0.0)
    assert owner.tolist() == [0, 1, 0]
    assert end_s.tolist() == pytest.approx([20, 100, 30])


def test_a_growing_context_is_read_again_for_every_token() -> None:
    rollout = Rollout([10.0, 20.0], 1, 8)
    _, end_s = rollout.play([0, 0, 0], [0, 1, 1], 100.0)
    # Two requests with 105 tokens in the middle, then one with 115.
    assert end_s.tolist() == pytest.approx([10 * 210, 10 * 210 + 10 * 115])


def test_requests_wait_for_a_slot() -> None:
    rollout = Rollout([10.0, 30.0, 5.0], 1, 2)
    _, end_s = rollout.play([0, 1, 2], [0, 0, 0], 0.0)
    # The third starts when the first has ended; two of them run until the third has ended.
    assert end_s.tolist() == pytest.approx([20, 45, 30])


def test_prompts_explain_lengths_and_come_again() -> None:
    workload = Workload(64, 16, 10, HeavyTail(2500, 12000, 32768), (), 0.65, 3)
    first, other, again = (workload.of_step(step, 0) for step in (1, 2, 4))
    means = [np.log(found).reshape(64, 16).mean(axis=1) for found in (first, again, other)]
    assert np.corrcoef(*means[:2])[0, 1] > 0.9
    assert np.corrcoef(means[0], means[2])[0, 1] < 0.5
    assert np.var(means[0]) / np.var(np.log(first)) == pytest.approx(0.67, abs=0.1)


def test_lengths_of_a_run_are_taken_in_turn() -> None:
    workload = Workload(1, 2, 10, trace=((5, 6), (7, 8)))
    assert [workload.of_step(n, 0).tolist() for n in (1, 2, 3)] == [[5, 6], [7, 8], [5, 6]]


# --- the strategy ---------------------------------------------------------------------------------


def test_the_production_strategy_settles_on_the_best_arm() -> None:
    choices = [OFF, Arm("eagle3", 1), Arm("eagle3", 2), Arm("eagle3", 4)]
    arms = [[arm.drafter, arm.num_draft_tokens] for arm in choices]
    player = Player(build_strategy({"kind": "adaptive", "arms": arms}), ENGINE)
    for _ in range(3):
        pace = player.rollout(DRAFTING, 0, 32, 500)

    def seconds(arm: Arm, running: int) -> float:
        return float(ENGINE.step_s(arm, running, 500)) / DRAFTING.tokens(arm)

    for running, arm in pace.arms.items():
        best = min(seconds(choice, running) for choice in choices)
        assert seconds(arm, running) <= 1.1 * best, (running, arm)
    assert pace.ratios[1] < 0.6


# --- runs -----------------------------------------------------------------------------------------

SMALL = ("num_steps=4", "cluster.num_engines=4", "workload.prompts_per_step=4")


def test_tlt_is_faster_where_there_is_a_tail_and_not_where_the_learner_is_slow() -> None:
    found = {name: figures(r) for name, r in simulate(scenario(*SMALL)).items()}
    gained = speed_ups(found)
    assert gained["tlt"]["rollout"] > 1.5
    assert gained["tlt"]["end_to_end"] > gained["static"]["end_to_end"] * 0.95
    slow = scenario(*SMALL, "learner.tokens_per_s=100")
    found = {name: figures(r) for name, r in simulate(slow).items()}
    assert speed_ups(found)["tlt"]["end_to_end"] < 1.1
    assert "learner" in in_words(found)


def test_idle_workers_bring_a_drafter_back() -> None:
    behind = ("drafter.start_power=2.5", "drafter.drift=0.05", "drafter.training_tokens=2e5")
    steps = simulate(scenario(*SMALL, *behind, "num_steps=8"))
    lengths = {name: [r["harvest/held_out_length"] for r in found] for name, found in steps.items()}
    assert lengths["tlt"][-1] > lengths["tlt"][0] + 0.3
    assert lengths["static"][-1] < lengths["static"][0]
    assert sum(r["harvest/published"] for r in steps["tlt"]) >= 1
    used = sum(r["harvest/used_s"] for r in steps["tlt"])
    coverable = sum(r["harvest/coverable_s"] for r in steps["tlt"])
    assert used > 0.6 * coverable


def test_the_fixed_arm_is_the_fastest_one() -> None:
    """With drafts that are hardly ever accepted, the shortest; else a long one."""
    weak, strong = (f"drafter.acceptance={rate}" for rate in (0.05, 0.9))
    few = (*SMALL, "num_steps=2", "draft_tokens=[1, 8]")
    assert completed(scenario(*few, weak)).static_draft_tokens == 1
    assert completed(scenario(*few, strong)).static_draft_tokens == 8
    assert completed(scenario(*few, strong, "static_draft_tokens=2")).static_draft_tokens == 2


def test_the_fixed_arm_is_the_fastest_over_all_of_a_run_with_drift() -> None:
    config = scenario(
        "num_steps=30", "cluster.num_engines=2", "workload={prompts_per_step=2, group_size=8}",
        "drafter.drift=0.1", "draft_tokens=[2, 8]", 'modes=["static"]',
    )  # fmt: skip

    def seconds(length: int) -> float:
        records = simulate(config.model_copy(update={"static_draft_tokens": length}))["static"]
        return sum(record["time/step_s"] for record in records)

    assert completed(config).static_draft_tokens == min((2, 8), key=seconds) == 2
    at_the_start = config.model_copy(update={"num_steps": 1})
    assert completed(at_the_start).static_draft_tokens == 8


def test_only_a_trained_drafter_lags_behind_the_policy() -> None:
    drafting = Drafting({"ngram": (0.5,), "eagle3": (0.5,)}).at(3)
    assert drafting.rate("eagle3", 0) == pytest.approx(0.125)
    assert drafting.rate("ngram", 0) == 0.5


def test_the_weight_sync_grows_with_the_nodes(tmp_path: Path) -> None:
    def sync_s(*settings: str) -> float:
        return cluster_of(scenario(*settings)).learner.sync_s

    one = sync_s("cluster.num_engines=8")
    assert one == pytest.approx(2 * 7.6e9 / 25e9)
    assert sync_s("cluster.num_engines=64") == pytest.approx(8 * one)
    assert sync_s("cluster.num_engines=64", "cluster.gpus_per_node=4") == pytest.approx(16 * one)
    assert sync_s("cluster.num_engines=64", "learner.sync_s=3") == 3
    path = tmp_path / "calibration.json"
    replace(CALIBRATION, learner=Learner(1000.0, sync_s=0.5)).save(path)
    calibrated = f'cluster.calibration="{path}"'
    assert sync_s("cluster.num_engines=2", calibrated) == 0.5
    assert sync_s("cluster.num_engines=16", calibrated) == 1.0


def test_drift_is_the_measured_one_by_default(tmp_path: Path) -> None:
    """The rate explains the tokens of drafts of 3; its power grows by the drift."""
    followed = json.loads((ROOT / "benchmarks" / "results" / "following.json").read_text())
    steps = [row["step"] for row in followed["policies"]]
    lengths = [row["drafters"]["frozen"]["length"] for row in followed["policies"]]
    grid = np.linspace(0.3, 0.9, 600_001)
    rates = [float(np.interp(length, 1 + grid + grid**2 + grid**3, grid)) for length in lengths]
    powers = [math.log(rate) / math.log(rates[0]) for rate in rates]
    drift = linear_regression(steps, powers).slope
    assert cluster_of(scenario()).training.drift == round(drift, 4) == DRIFT
    replace(CALIBRATION, training=Training(drift=0.02)).save(tmp_path / "c.json")
    calibrated = scenario(f'cluster.calibration="{tmp_path / "c.json"}"')
    assert cluster_of(calibrated).training.drift == 0.02


def test_the_answer_names_the_fixed_arm_and_what_harvest_brings() -> None:
    found = {
        "off": {"step_s": 10.0, "rollout_s": 8.0, "rollout_share": 0.8, "idle_share": 0.4},
        "static": {"step_s": 6.0, "rollout_s": 4.0, "rollout_share": 0.7, "idle_share": 0.4},
        "frozen": {"step_s": 5.5, "rollout_s": 3.5, "rollout_share": 0.7, "idle_share": 0.4},
        "tlt": {"step_s": 5.0, "rollout_s": 3.0, "rollout_share": 0.6, "idle_share": 0.4},
    }
    words = in_words(found, "the best fixed arm, eagle3:4")
    for told in ("2.00x", "1.20x as fast as the best fixed arm, eagle3:4", "1.10x"):
        assert told in words
    assert contributions(found)["harvest"]["rollout"] == pytest.approx(3.5 / 3)
    assert contributions({"off": found["off"]}) == {}
    few = {name: found[name] for name in ("off", "tlt")}
    assert "arvest" not in in_words(few)
    assert "All of it is harvest's part" in in_words(few, from_nothing=True)
    from_ngrams = {"ngram" if name == "frozen" else name: of for name, of in found.items()}
    assert contributions(from_ngrams) == contributions(found)


def test_the_picture_shows_other_engines_drafters_and_tails(tmp_path: Path) -> None:
    config = scenario(*SMALL, "num_steps=2")
    ends: dict[str, Any] = {}
    records = simulate(config, lambda name, run: ends.update({name: run.engine_ends}))
    found = {name: figures(of) for name, of in records.items()}
    curves = what_if(config, lambda what, done, total: None)
    engines, drafters, tails = curves.values()
    assert [value for value, _ in engines] == [1, 2, 4, 8, 16]
    assert drafters[-1][1]["tlt"] > drafters[0][1]["tlt"]
    assert tails[-1][1]["tlt"] > tails[0][1]["tlt"]
    (tmp_path / "lengths.jsonl").write_text('{"step": 1, "tokens": [5, 9]}\n')
    traced = scenario(*SMALL, "num_steps=1", f'workload.trace="{tmp_path / "lengths.jsonl"}"')
    assert len(what_if(traced, lambda what, done, total: None)) == 2, "a trace has its own tail"
    picture = plot_simulation(ends, found, curves, ["assumed: much"], tmp_path / "simulation.svg")
    assert picture.stat().st_size > 5_000


def test_failures_cost_time_and_nothing_else() -> None:
    calm = simulate(scenario(*SMALL, 'modes=["tlt"]'))["tlt"]
    rough = simulate(scenario(*SMALL, 'modes=["tlt"]', "cluster.engine_deaths_per_hour=30"))["tlt"]
    assert len(rough) == len(calm)
    assert sum(r["time/rollout_s"] for r in rough) > sum(r["time/rollout_s"] for r in calm)


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(scenario(*SMALL)) == simulate(scenario(*SMALL))


def test_a_thousand_workers_are_simulated_in_seconds() -> None:
    started_s = time.process_time()
    large = scenario(
        "num_steps=3", "cluster.num_engines=1024", "workload.prompts_per_step=1024",
        'modes=["off", "tlt"]',
    )  # fmt: skip
    records = simulate(large)
    assert time.process_time() - started_s < 20
    assert len(records["tlt"]) == 3


def test_drift_and_recovery_are_found_in_runs() -> None:
    true = Training(drift=0.05, tokens=1e4, best_power=0.7)

    def run(tokens: float, seed: int) -> list[dict[str, float]]:
        rng = random.Random(seed)
        power, records = 1.0, []
        for _ in range(20):
            hits = 0.7**power + rng.gauss(0, 0.002)
            record = {"rollout/drafter_hit_share": hits}
            if tokens:
                record |= {"harvest/trained_tokens": tokens, "harvest/used_s": tokens / 500}
            records.append(record)
            behind = power + true.drift - true.best_power
            power = true.best_power + behind * math.exp(-tokens / true.tokens)
        return records

    found = training([run(0.0, 1), run(5000.0, 2)])
    assert found.drift == pytest.approx(0.05, abs=0.01)
    assert found.tokens == pytest.approx(1e4, rel=0.5)
    assert found.best_power == pytest.approx(0.7, abs=0.1)
    assert found.tokens_per_s == pytest.approx(500)
    assert training([[{"reward/mean": 0.0}] * 20]) == Training(drift=DRIFT)


def test_the_learner_of_a_run_shares_prompts() -> None:
    """Two of four groups are trained on, and compute their prompt once for eight samples."""
    config = {"sampling": {"prompts_per_step": 4, "group_size": 8}}

    def record(response: int) -> dict[str, float]:
        tokens, spared = 16 * (100 + response), 14 * 100
        return {
            "prompt/mean_tokens": 100.0,
            "rollout/output_tokens": 32.0 * response,
            "learner/tokens": float(tokens),
            "learner/shared_share": spared / tokens,
            "time/update_s": 0.5 + (tokens - spared) / 1000,
        }

    records = [record(response) for response in (10, 50, 100, 200)]
    found = learner([RunView("run", config, records, records, [], [])])
    assert found.tokens_per_s == pytest.approx(1000)
    assert found.step_s == pytest.approx(0.5)
    assert found.trained_share == pytest.approx(0.5)
    assert found.prompt_share == pytest.approx(1 / 8)


CALIBRATION = Calibration(ENGINE, DRAFTING, Learner(1000.0), 50.0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine", "step"), -0.02),
        (("engine", "step"), "fast"),
        (("engine", "surprise"), 1),
        (("engine",), {"step": 0.0}),
        (("learner", "tokens_per_s"), 10**400),
        (("training", "tokens"), float("nan")),
        (("drafting", "rates", "eagle3"), [2.0]),
        (("drafting",), None),
    ],
)
def test_a_damaged_calibration_is_refused(
    tmp_path: Path, place: tuple[str, ...], value: Any
) -> None:
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    assert Calibration.load(path).engine == ENGINE
    tree = json.loads(path.read_text())
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"calibration\.json"):
        Calibration.load(path)


@pytest.mark.parametrize("content", ["", "[1]", "[" * 5000])
def test_a_calibration_that_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(ConfigError, match="tlt calibrate"):
        Calibration.load(tmp_path / "calibration.json")


@pytest.mark.parametrize(
    "content", ["", '{"step": 1, "tokens": [0, 0]}\n', '{"step": 1, "tokens": [-5]}\n', "{\n{\n"]
)
def test_a_trace_without_lengths_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths.jsonl").write_text(content)
    for name in ("lengths.jsonl", "nowhere"):
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("learner.tokens_per_s=inf", "learner.tokens_per_s"),
        ("workload.prompt_tokens=nan", "workload.prompt_tokens"),
        ("num_steps=1000000", "num_steps"),
        ("workload={prompts_per_step=90000, group_size=9000}", "workload"),
        ("draft_tokens=[65]", "draft_tokens.0"),
    ],
)
def test_values_that_cannot_be_simulated_are_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^test: {re.escape(key)}"):
        scenario(override)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("learner.tokens_per_s=1e-9", "the update"),
        ("learner.reward_s=1e9", "the wait for rewards"),
        ("cluster.engine_start_s=1e7", "the rollout"),
        ("workload.lengths.median=50000", "workload.lengths"),
    ],
)
def test_steps_that_would_never_end_are_refused(override: str, what: str) -> None:
    config = scenario(
        *("num_steps=2", "workload.prompts_per_step=4", "cluster.num_engines=1"),
        *("cluster.engine_deaths_per_hour=3600", "learner.tokens_per_s=10", override),
    )
    with pytest.raises(ConfigError, match=what):
        simulate(config)


def test_a_calibration_is_kept(tmp_path: Path) -> None:
    saved = Calibration(ENGINE, DRAFTING, Learner(1000.0), 50.0, Training(drift=0.1), "here")
    saved.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == saved
