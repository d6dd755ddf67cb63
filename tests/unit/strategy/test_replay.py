"""The replay that strategies are compared with: its acceptances and its oracle."""

from collections.abc import Callable

import pytest
from benchmarks.replay import SCENARIOS, StepTable, compare, published_h100, replay
from strategy_fixtures import EAGLE, always, recorded, rollouts


@pytest.mark.parametrize("make", [recorded, published_h100])
def test_a_replay_accepts_as_many_tokens_as_the_oracle_expects(
    make: Callable[[], StepTable],
) -> None:
    table = make()
    for arm in table.seconds:
        made = replay(always(arm), table, lambda p: 1.0, [[9000] * 16], seed=0)
        steady = [r for r in made.reports if r.verified == arm and r.num_decodes == 16]
        gained = sum(r.num_decodes + r.num_accepted_tokens for r in steady)
        decodes = sum(r.num_decodes for r in steady)
        assert gained / decodes == pytest.approx(table.tokens(arm, 1.0), rel=0.02), arm


def test_the_oracle_is_not_beaten_by_a_fixed_arm() -> None:
    fixed = {str(arm): always(arm) for arm in EAGLE}
    rows = compare(recorded(), fixed, rollouts(3, 64), seeds=[0])
    assert {row["scenario"] for row in rows} == set(SCENARIOS)
    assert all(row["of_oracle"] < 1.02 for row in rows)
