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

import numpy as np
import pytest

from tlt.config.load import apply_overrides, check
from tlt.contracts import OFF, Arm
from tlt.errors import ConfigError
from tlt.simulate import clock
from tlt.simulate.answer import figures, in_words, speed_ups
from tlt.simulate.calibrate import Calibration
from tlt.simulate.cluster import Learner, Training
from tlt.simulate.rollout import Player, Rollout
from tlt.simulate.scenario import ScenarioConfig, cluster_of, completed, simulate
from tlt.simulate.workload import Workload, spread
from tlt.strategy.spec import build_strategy
from tlt.tasks.tail import HeavyTail
from tlt.timing.model import Drafting, EngineModel
from tlt.timing.profiles import DRIFT

ROOT = Path(__file__).parents[3]
ENGINE = EngineModel(step=0.02, row=0.0005, context=1e-7, drafting=0.002, draft_pass=0.001)
DRAFTING = Drafting({"eagle3": (0.8, 0.64, 0.51, 0.41), "ngram": (0.5,)})
CALIBRATION = Calibration(ENGINE, DRAFTING, Learner(1000.0), 50.0)


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


def test_expected_tokens() -> None:
    assert DRAFTING.tokens(OFF) == 1
    assert DRAFTING.tokens(Arm("eagle3", 2)) == pytest.approx(1 + 0.8 + 0.64)
    assert DRAFTING.at(2.0).tokens(Arm("eagle3", 1)) == pytest.approx(1 + 0.64)
    beyond = DRAFTING.tokens(Arm("eagle3", 6)) - DRAFTING.tokens(Arm("eagle3", 5))
    assert 0 < beyond < 0.41
    assert DRAFTING.at(3).rate("ngram", 0) == 0.5, "only a trained drafter lags behind"


# --- the workload ---------------------------------------------------------------------------------


def test_lengths_are_those_of_a_run_with_forced_lengths() -> None:
    sizes = HeavyTail(45, 600, 900)
    theirs = sorted(sizes.spread(4096, random.Random(0)))
    mine = np.sort(spread(sizes, 4096, np.random.default_rng(0)))
    for share in (0.1, 0.5, 0.9, 0.99):
        at = int(share * 4096)
        assert mine[at] == pytest.approx(theirs[at], rel=0.03)


@pytest.mark.parametrize(
    ("lengths", "engines", "slots", "ends_s"),
    [
        ([10.0, 100.0, 20.0], 2, 8, [20, 100, 30]),
        # The third starts when the first has ended; two of them run until the third has ended.
        ([10.0, 30.0, 5.0], 1, 2, [20, 45, 30]),
    ],
)
def test_an_engine_takes_as_long_as_its_requests_let_it(
    lengths: list[float], engines: int, slots: int, ends_s: list[float]
) -> None:
    """Two requests cost 2 seconds a token, one costs 1."""
    _, end_s = Rollout(lengths, engines, slots).play([0, 1, 2], [0, 0, 0], 0.0)
    assert end_s.tolist() == pytest.approx(ends_s)


def test_a_growing_context_is_read_again_for_every_token() -> None:
    _, end_s = Rollout([10.0, 20.0], 1, 8).play([0, 0, 0], [0, 1, 1], 100.0)
    # Two requests with 105 tokens in the middle, then one with 115.
    assert end_s.tolist() == pytest.approx([10 * 210, 10 * 210 + 10 * 115])


def test_prompts_explain_lengths_and_come_again() -> None:
    workload = Workload(64, 16, 10, HeavyTail(2500, 12000, 32768), 0.65, 3)
    first, other, again = (workload.of_step(step, 0) for step in (1, 2, 4))
    means = [np.log(found).reshape(64, 16).mean(axis=1) for found in (first, other, again)]
    assert np.corrcoef(means)[0, 2] > 0.9
    assert abs(np.corrcoef(means)[0, 1]) < 0.5
    assert np.var(means[0]) / np.var(np.log(first)) == pytest.approx(0.67, abs=0.1)


def test_lengths_of_a_run_are_taken_in_turn() -> None:
    workload = Workload(1, 2, 10, ((5, 6), (7, 8)))
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

    for running in (1, 4, 32):
        best = min(seconds(choice, running) for choice in choices)
        assert pace.ratios[running] <= 1.1 * best / seconds(OFF, running), running
    assert pace.ratios[1] < 0.6


# --- runs -----------------------------------------------------------------------------------------

SMALL = ("num_steps=4", "cluster.num_engines=4", "workload.prompts_per_step=4")


def test_tlt_is_faster_where_there_is_a_tail_and_not_where_the_learner_is_slow() -> None:
    small = (*SMALL, "static_draft_tokens=3")
    found = {name: figures(r) for name, r in simulate(scenario(*small)).items()}
    gained = speed_ups(found)
    assert gained["tlt"]["rollout"] > 1.5
    assert gained["tlt"]["end_to_end"] > gained["static"]["end_to_end"] * 0.95
    slow = scenario(*small, "learner.tokens_per_s=100")
    found = {name: figures(r) for name, r in simulate(slow).items()}
    assert speed_ups(found)["tlt"]["end_to_end"] < 1.1
    assert "learner" in in_words(found)


def test_idle_workers_bring_a_drafter_back() -> None:
    behind = (
        "static_draft_tokens=3",
        "drafter.start_power=2.5",
        "drafter.drift=0.05",
        "drafter.training_tokens=2e5",
    )
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


def test_the_weight_sync_follows_the_transport_and_the_nodes(tmp_path: Path) -> None:
    def sync_s(*settings: str) -> float:
        return cluster_of(scenario(*settings)).learner.sync_s

    hosts, nodes = 'cluster.transport="shared_memory"', "cluster.num_engines=64"
    one = sync_s(hosts, "cluster.num_engines=8")
    assert sync_s(hosts, nodes) > one + 7 * 2 * 7.6e9 / 25e9, "one card sends it to the others"
    assert sync_s(nodes) < 1 < one, "from GPU to GPU by default"
    assert sync_s(nodes, "learner.sync_s=3") == 3
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


def test_failures_cost_time_and_nothing_else() -> None:
    calm = simulate(scenario(*SMALL, 'modes=["tlt"]'))["tlt"]
    rough = simulate(scenario(*SMALL, 'modes=["tlt"]', "cluster.engine_deaths_per_hour=30"))["tlt"]
    assert len(rough) == len(calm)
    assert calm == simulate(scenario(*SMALL, 'modes=["tlt"]'))["tlt"], "not the same by this seed"
    assert sum(r["time/rollout_s"] for r in rough) > sum(r["time/rollout_s"] for r in calm)


def test_a_thousand_workers_are_simulated_in_seconds() -> None:
    started_s = time.process_time()
    large = scenario(
        "num_steps=3", "cluster.num_engines=1024", "workload.prompts_per_step=1024",
        'modes=["off", "tlt"]',
    )  # fmt: skip
    records = simulate(large)
    assert time.process_time() - started_s < 20
    assert len(records["tlt"]) == 3


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("learner.tokens_per_s=inf", "learner.tokens_per_s"),
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
