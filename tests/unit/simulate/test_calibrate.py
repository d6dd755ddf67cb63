"""What runs say about a machine: a calibration, and what drafts saved."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from made_up import made_up_folder

from tlt.contracts import OFF, Arm
from tlt.errors import ConfigError
from tlt.report.view import RunView, look_at
from tlt.simulate.calibrate import Calibration, learner, training
from tlt.simulate.cluster import Learner, Training
from tlt.simulate.saved import saved
from tlt.simulate.workload import read_trace
from tlt.timing.model import Drafting, EngineModel, Observation, fit
from tlt.timing.profiles import DRIFT

ENGINE = EngineModel(step=0.02, row=0.0005, context=1e-7, drafting=0.002, draft_pass=0.001)
DRAFTING = Drafting({"eagle3": (0.8, 0.64, 0.51, 0.41)})
CALIBRATION = Calibration(ENGINE, DRAFTING, Learner(1000.0), 50.0, Training(drift=0.1), "here")


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
    with pytest.raises(ValueError, match="too few"):
        fit(found[:1])


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


def test_rounding_makes_no_negative_time_of_an_update() -> None:
    """Updates that take equally long are all time per token, whatever their tokens are."""
    seconds = 1.7918079144195904
    records = [
        {"learner/tokens": tokens, "time/update_s": seconds, "rollout/output_tokens": tokens}
        for tokens in (1.0, 8928.0, 4904.0, 3933.0)
    ]
    found = learner([RunView("run", {}, records, records, [], [])])
    assert found.step_s == 0
    assert 1 / found.tokens_per_s * 5921.67 == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine", "step"), -0.02),
        (("engine", "step"), "fast"),
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
    assert Calibration.load(path) == CALIBRATION
    tree = json.loads(path.read_text())
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=rf"calibration\.json.*{place[0]}.*calibrate"):
        Calibration.load(path)


@pytest.mark.parametrize("content", ["", "[1]", "[" * 5000])
def test_a_calibration_that_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(ConfigError, match="tlt simulate calibrate"):
        Calibration.load(tmp_path / "calibration.json")


@pytest.mark.parametrize("content", ["", '{"step": 1, "tokens": [-5]}\n', "{\n{\n"])
def test_a_trace_without_lengths_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths.jsonl").write_text(content)
    for name in ("lengths.jsonl", "nowhere"):
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name)


# --- what drafts saved ----------------------------------------------------------------------------

STEP_S, ROW_S, PASS_S = 0.05, 0.0005, 0.004
"""Seconds of an engine step, of a row in it, and of a pass of the draft model."""
Made = tuple[str, float, int, int, int]


def span(arm: str, running: int, steps: int, accepted: int) -> Made:
    """Return engine steps that took what the figures above say."""
    length = int(arm.partition(":")[2] or 0)
    step_s = STEP_S + ROW_S * running * (1 + length) + PASS_S * length
    return arm, steps * step_s, running, steps * running + accepted, accepted


DRAFTED = (
    *(span("eagle3:2", 16, 20, 400), span("eagle3:2", 8, 20, 200), span("eagle3:3", 8, 20, 300)),
    *(span("eagle3:3", 4, 20, 150), span("eagle3:4", 4, 20, 200), span("eagle3:4", 2, 40, 120)),
    *(span("eagle3:3", 1, 40, 60), span("eagle3:6", 1, 40, 90)),
)
PLAIN = tuple(span("off", running, 30, 0) for running in (16, 8, 4, 1))
FIRST = span("off", 16, 5, 0)
"""Also reads the prompts, so it measures nothing."""
BESIDES_S = 3.0
"""Seconds of a rollout besides engine steps."""


def rollout_s(arms: Sequence[Made]) -> tuple[float, float]:
    """Return the seconds of a rollout with these spans, as it was and by plain decoding."""
    plain = sum(
        each[1] if each[0] == "off" else each[3] / each[2] * (STEP_S + ROW_S * each[2])
        for each in arms
    )
    return BESIDES_S + sum(each[1] for each in arms), BESIDES_S + plain


def test_the_model_finds_what_plain_decoding_would_have_taken(tmp_path: Path) -> None:
    arms = (FIRST, *PLAIN, *DRAFTED)
    seconds, plain_s = rollout_s(arms)
    found = saved(look_at(made_up_folder(tmp_path / "run", arms=arms, time__rollout_s=seconds)))
    assert found is not None
    assert found.measured_s == pytest.approx(3 * seconds, rel=1e-3)
    assert found.plain_s == pytest.approx(3 * plain_s, rel=0.05)
    assert found.gain > 1.2
    assert not found.is_bound


def test_prompts_that_drafts_follow_at_once_are_read_without_drafts_too(tmp_path: Path) -> None:
    """The first span drafts, and took ten seconds longer than its engine steps."""
    first = span("eagle3:2", 16, 20, 400)
    arms = (first, *PLAIN, *DRAFTED)
    seconds, plain_s = rollout_s(arms)
    slow = (first[0], first[1] + 10.0, *first[2:])
    folder = made_up_folder(
        tmp_path / "run", arms=(slow, *arms[1:]), time__rollout_s=seconds + 10.0
    )
    found = saved(look_at(folder))
    assert found is not None
    assert found.plain_s == pytest.approx(3 * (plain_s + 10.0), rel=0.05)


def test_without_plain_decoding_there_is_only_a_bound(tmp_path: Path) -> None:
    arms = (FIRST, *DRAFTED)
    seconds, plain_s = rollout_s(arms)
    found = saved(look_at(made_up_folder(tmp_path / "run", arms=arms, time__rollout_s=seconds)))
    assert found is not None
    assert found.is_bound
    per_request = sum(each[1] * each[3] / (each[3] - each[4]) for each in arms)
    assert found.plain_s == pytest.approx(3 * (BESIDES_S + per_request), rel=1e-3)
    assert found.plain_s > 3 * plain_s


def test_a_run_without_drafts_or_with_few_engine_steps_says_nothing(tmp_path: Path) -> None:
    plain = made_up_folder(tmp_path / "plain", arms=PLAIN, time__rollout_s=20.0)
    short = made_up_folder(tmp_path / "short", arms=DRAFTED[:2], steps=2)
    assert saved(look_at(plain)) is None
    assert saved(look_at(short)) is None
