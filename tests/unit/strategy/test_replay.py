"""The replay that strategies are compared with: its acceptances, its text and its oracle."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from benchmarks.replay import SCENARIOS, StepTable, compare, published_h100, replay
from strategy_fixtures import EAGLE, always, given_strategy, recorded, rollouts

from tlt.bench.steps import step_table
from tlt.contracts import OFF, Arm, StepContext
from tlt.errors import ConfigError
from tlt.strategy.spec import Fixed


def test_tables_survive_being_written(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps({"steps": recorded().as_dict()}))
    assert StepTable.load(path) == recorded()
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"rollout\.json"):
        StepTable.load(path)


def test_a_table_is_learned_from_reports() -> None:
    table = recorded()
    arm = EAGLE[2]
    made = replay(always(arm), table, lambda p: 1.0, rollouts(4, 64), 0)
    learned = StepTable.from_dict(step_table(made.reports))
    assert learned.accepted["eagle3"] == pytest.approx(table.accepted["eagle3"], abs=0.03)
    for batch in (2, 16, 40):
        assert learned.step_s(batch, arm, arm) == pytest.approx(
            table.step_s(batch, arm, arm), rel=0.15
        )


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


def test_by_the_same_seed_every_strategy_drafts_the_same_text() -> None:
    """Two strategies that draft alike from some token on get the same acceptances from there on."""
    table, arm = recorded(), Arm("eagle3", 4)

    class LateStart(Fixed):
        def decide(self, context: StepContext) -> Arm:
            return OFF if context.step < 7 else super().decide(context)

    ends = []
    for strategy in (Fixed(arm), LateStart(arm)):
        made = replay(partial(given_strategy, strategy), table, lambda p: 1.0, [[600]], seed=0)
        left = [600 - sum(r.num_output_tokens for r in made.reports[:n]) for n in range(200)]
        ends.append([rest for rest in left if 0 < rest < 500])
    assert len(set(ends[0]) & set(ends[1])) > 0.8 * len(set(ends[0]))


def test_the_oracle_is_not_beaten_by_a_fixed_arm() -> None:
    fixed = {str(arm): always(arm) for arm in EAGLE}
    rows = compare(recorded(), fixed, rollouts(3, 64), seeds=[0])
    assert {row["scenario"] for row in rows} == set(SCENARIOS)
    assert all(row["of_oracle"] < 1.02 for row in rows)
