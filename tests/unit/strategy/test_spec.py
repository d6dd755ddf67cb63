"""Specs of strategies, and the strategies that do not learn."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import OFF, Arm, StepContext
from tlt.errors import ConfigError
from tlt.strategy.spec import build_strategy


def context(num_decodes: int, num_prefills: int = 0) -> StepContext:
    return StepContext(step=0, num_decodes=num_decodes, num_prefills=num_prefills, num_waiting=0)


def test_arm_refuses_contradictions() -> None:
    with pytest.raises(ValueError, match="'off' drafts 0"):
        Arm("off", 2)
    with pytest.raises(ValueError, match="at least 1"):
        Arm("eagle3", 0)


def test_off_and_fixed() -> None:
    assert build_strategy({"kind": "off"}).decide(context(1)) == OFF
    fixed = build_strategy({"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 3})
    assert fixed.decide(context(100)) == Arm("ngram", 3)
    assert fixed.arms() == {Arm("ngram", 3)}


@given(st.integers(0, 200), st.integers(0, 200))
def test_by_batch_size_counts_decodes_only(num_decodes: int, num_prefills: int) -> None:
    strategy = build_strategy(
        {"kind": "by_batch_size", "drafter": "eagle3", "schedule": [[4, 4], [16, 2]]}
    )
    arm = strategy.decide(context(num_decodes, num_prefills))
    expected = Arm("eagle3", 4) if num_decodes <= 4 else Arm("eagle3", 2)
    assert arm == (OFF if num_decodes > 16 else expected)
    assert arm in strategy.arms()


def test_random_is_deterministic_under_a_seed() -> None:
    spec = {"kind": "random", "arms": [["off", 0], ["ngram", 2], ["eagle3", 8]], "seed": 3}
    first, second = build_strategy(spec), build_strategy(spec)
    drawn = [first.decide(context(1)) for _ in range(200)]
    assert drawn == [second.decide(context(1)) for _ in range(200)]
    assert set(drawn) == first.arms()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "strategy.kind is None"),
        ({"kind": "bandit9000"}, "one of"),
        ({"kind": "fixed", "drafter": "eagle3"}, "needs the key 'num_draft_tokens'"),
        ({"kind": "fixed", "drafter": "medusa", "num_draft_tokens": 2}, "unknown drafter"),
        ({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 0}, "at least 1"),
        ({"kind": "by_batch_size", "drafter": "eagle3", "schedule": []}, "schedule is empty"),
        (
            {"kind": "by_batch_size", "drafter": "eagle3", "schedule": [[8, 2], [4, 4]]},
            "rising batch sizes",
        ),
        ({"kind": "random", "arms": []}, "strategy.arms is empty"),
        (
            {"kind": "beg_mab", "arms": [], "epsilon": 2},
            "epsilon = 2 should be a number from 0 to 1",
        ),
        ({"kind": "adaptive", "arms": [], "margin": float("inf")}, "margin = inf should be"),
        ({"kind": "fixed"}, "needs the key 'drafter'; e.g. { kind = \"fixed\", drafter ="),
    ],
)
def test_errors_say_what_a_spec_needs(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategy(spec)
