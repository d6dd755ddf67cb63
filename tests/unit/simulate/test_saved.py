"""What drafts saved, by a cost model of the run's own engine steps."""

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from made_up import made_up_folder

from tlt.report.view import look_at
from tlt.simulate.saved import saved

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


def test_a_run_without_drafts_saved_nothing(tmp_path: Path) -> None:
    view = look_at(made_up_folder(tmp_path / "run", arms=PLAIN, time__rollout_s=20.0))
    assert saved(view) is None


def test_few_engine_steps_say_nothing(tmp_path: Path) -> None:
    view = look_at(made_up_folder(tmp_path / "run", arms=DRAFTED[:2], steps=2))
    assert saved(view) is None
