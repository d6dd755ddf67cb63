"""The estimates behind the adaptive strategy: acceptance of drafts, and times of engine steps."""

import random

import pytest
from strategy_fixtures import ARMS, EAGLE, report

from tlt.contracts import OFF, Arm
from tlt.strategy.acceptance import Acceptance
from tlt.strategy.step_time import StepTime, batch_bucket


def verified(acceptance: Acceptance, accepted_at: tuple[int, ...], steps: int) -> bool:
    """Verify ten drafts per step; return whether the text turned in any step."""
    made = report((Arm("eagle3", len(accepted_at)), OFF), 10, 0.1, accepted_at)
    return sum(bool(acceptance.observe(made)) for _ in range(steps)) > 0


def test_acceptance_is_shared_between_lengths() -> None:
    acceptance = Acceptance(max_draft_tokens=6)
    verified(acceptance, (8, 6), steps=50)
    assert acceptance.expected_tokens()[1] == pytest.approx(1.8, abs=0.03)
    assert acceptance.expected_tokens()[2] == pytest.approx(2.4, abs=0.05)
    expected, optimistic = acceptance.expected_tokens()[4], acceptance.optimistic_tokens(in_use=2)
    assert 2.6 < expected < 3.4
    assert optimistic[4] > expected + 0.1  # no draft reached these positions
    assert optimistic[:3] == acceptance.expected_tokens()[:3]  # no doubt


def test_hard_text_is_hard_for_longer_drafts_too() -> None:
    acceptance = Acceptance(max_draft_tokens=6)
    verified(acceptance, (10, 10, 8, 8, 8, 8), steps=50)  # easy
    verified(acceptance, (2, 0), steps=80)  # hard, while short drafts are in use
    assert acceptance.expected_tokens()[6] < acceptance.expected_tokens()[2] + 0.2
    assert acceptance.expected_tokens(usual=True)[6] > 2
    acceptance.expect_other_text()
    assert acceptance.expected_tokens()[2] == pytest.approx(
        acceptance.expected_tokens(usual=True)[2], abs=0.2
    )


def test_a_jump_replaces_the_short_memory_within_a_few_drafts() -> None:
    acceptance = Acceptance(max_draft_tokens=4)
    assert not verified(acceptance, (8, 6), steps=50)
    assert verified(acceptance, (0, 0), steps=3)
    assert acceptance.expected_tokens()[2] < 1.6
    assert acceptance.expected_tokens(usual=True)[2] > 2  # other text is still as it was


def test_a_trial_that_does_not_fit_replaces_both_memories() -> None:
    acceptance = Acceptance(max_draft_tokens=4, prior=0.7)
    verified(acceptance, (1, 0), steps=150)
    acceptance.begin()
    verified(acceptance, (8,), steps=2)
    assert acceptance.expected_tokens(usual=True)[4] < 1.3
    assert acceptance.believe_latest(ease=1.0)
    assert acceptance.expected_tokens(usual=True)[4] > 2.5  # nothing of the old drafts is left
    assert acceptance.expected_tokens()[4] > 2.5


def test_text_that_is_easy_for_both_drafters_is_not_a_change() -> None:
    acceptance = Acceptance(max_draft_tokens=4)
    verified(acceptance, (4, 2), steps=150)
    acceptance.begin()
    verified(acceptance, (8, 6), steps=2)
    assert not acceptance.believe_latest(ease=2.0)
    assert acceptance.believe_latest(ease=1.0)


def test_the_long_memory_tells_the_short_one_about_rare_positions() -> None:
    """Few drafts get to the last positions, where nearly all are accepted."""
    acceptance = Acceptance(max_draft_tokens=12)
    verified(acceptance, (3, *[2] * 11), steps=200)
    verified(acceptance, (3, 2), steps=12)  # shorter drafts in the same text
    acceptance.expect_other_text()
    assert acceptance.expected_tokens()[12] == pytest.approx(1 + 0.3 + 11 * 0.2, rel=0.1)


def test_the_pace_follows_a_machine_that_stalls_and_the_arms_keep_their_times() -> None:
    model, arm = StepTime(frozenset(ARMS)), EAGLE[1]
    rng = random.Random(0)

    def run(used: Arm, seconds: float, steps: int) -> None:
        for _ in range(steps):
            made = report((used, used), 8, seconds * rng.uniform(0.9, 1.1))
            model.observe(made, steady=True)

    def seconds(used: Arm) -> float:
        return model.expected_s(8, 8 * used.num_draft_tokens, model.of(used))[0]

    run(OFF, 0.09, 40)
    run(arm, 0.12, 60)
    before = seconds(arm) / seconds(OFF)
    run(arm, 5 * 0.12, 10)
    assert seconds(arm) == pytest.approx(5 * 0.12, rel=0.2)
    assert seconds(arm) / seconds(OFF) == pytest.approx(before, rel=0.05)
    run(arm, 0.12, 10)
    assert seconds(arm) == pytest.approx(0.12, rel=0.2)
    assert seconds(arm) / seconds(OFF) == pytest.approx(before, rel=0.05)


def test_one_long_step_is_no_stall() -> None:
    model = StepTime(frozenset(ARMS))
    for step in range(60):
        model.observe(report((OFF, OFF), 8, 2.0 if step % 20 == 19 else 0.09), steady=True)
    assert model.expected_s(8, 0, model.of(OFF))[0] == pytest.approx(0.09, rel=0.1)


def test_step_time_predicts_arms_never_tried() -> None:
    model = StepTime(frozenset(ARMS))

    def truth(decodes: int, arm: Arm) -> float:
        k = arm.num_draft_tokens
        return 0.02 + 0.0005 * decodes + 0.001 * decodes * k + (0.001 + 0.002 * k) * (k > 0)

    rng = random.Random(0)
    for _ in range(600):
        decodes, arm = rng.randint(1, 32), rng.choice([OFF, EAGLE[0], EAGLE[1]])
        model.observe(report((arm, arm), decodes, truth(decodes, arm)), steady=True)
    seconds, error, _ = model.expected_s(16, 16 * 4, model.of(EAGLE[2]))
    assert seconds == pytest.approx(truth(16, EAGLE[2]), rel=0.15)
    assert error > model.expected_s(16, 16, model.of(EAGLE[0]))[1]


def test_buckets_are_coarse_for_large_batches() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 13, 17, 25, 64)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]  # fmt: skip
