"""Specs of strategies, and the strategies that do not learn."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import OFF, Arm, StepContext
from tlt.errors import ConfigError
from tlt.strategy.spec import build_strategy, complete_strategy, trained_draft_tokens


def context(num_decodes: int, num_prefills: int = 0) -> StepContext:
    return StepContext(step=0, num_decodes=num_decodes, num_prefills=num_prefills, num_waiting=0)


def test_arm_refuses_contradictions() -> None:
    for drafter, length in (("off", 2), ("eagle3", 0)):
        with pytest.raises(ValueError):
            Arm(drafter, length)


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


BY_SIZE = {"kind": "by_batch_size", "drafter": "eagle3"}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({}, "adaptive"),
        ({"kind": "bandit9000"}, "adaptive"),
        ({"kind": "fixed"}, r"drafter.*kind = "),
        ({"kind": "fixed", "drafter": "eagle3"}, "num_draft_tokens"),
        ({"kind": "fixed", "drafter": "medusa", "num_draft_tokens": 2}, "medusa.*eagle3"),
        ({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 0}, "1"),
        ({**BY_SIZE, "schedule": []}, r"schedule.*\[\[4, 4\]"),
        ({**BY_SIZE, "schedule": [[8, 2], [4, 4]]}, r"schedule.*\[\[4, 4\]"),
        ({"kind": "random", "arms": []}, r"arms.*eagle3"),
        ({"kind": "beg_mab", "arms": [], "epsilon": 2}, "epsilon = 2 .*from 0 to 1"),
        ({"kind": "adaptive", "arms": [], "margin": float("inf")}, "margin = inf"),
        ({"kind": "adaptive", "arms": [], "margins": 1}, "margins.*margin"),
    ],
)
def test_errors_name_the_key_and_what_works(spec: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build_strategy(spec)


def test_a_learning_kind_takes_the_arms_of_the_engine_unless_the_spec_names_some() -> None:
    spec = complete_strategy({"kind": "adaptive"}, ["ngram"])
    assert build_strategy(spec).arms() == {OFF, Arm("ngram", 2), Arm("ngram", 4), Arm("ngram", 8)}
    on_gpu = complete_strategy({"kind": "adaptive"}, ["ngram", "eagle3"], on_gpu=True)
    gpu_arms = {OFF, *(Arm("eagle3", k) for k in (1, 3, 7)), Arm("ngram", 3), Arm("ngram", 7)}
    assert build_strategy(on_gpu).arms() == gpu_arms
    assert build_strategy(complete_strategy({"kind": "beg_mab"}, [])).arms() == {OFF}
    named = {"kind": "adaptive", "arms": [["eagle3", 3]], "margin": 0.1}
    assert build_strategy(complete_strategy(named, ["ngram"])).arms() == {OFF, Arm("eagle3", 3)}


@pytest.mark.parametrize(
    ("spec", "on_gpu"),
    [
        ({"kind": "adaptive"}, 7),
        ({"kind": "adaptive", "arms": [["off", 0], ["eagle3", 3], ["ngram", 7]]}, 3),
        ({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 5}, 5),
        ({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 32}, 16),
        ({"kind": "by_batch_size", "drafter": "eagle3", "schedule": [[4, 6], [16, 2]]}, 6),
        ({"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 7}, 4),
        ({"kind": "off"}, 4),
    ],
)
def test_drafters_on_gpus_are_trained_as_deep_as_they_draft(
    spec: dict[str, Any], on_gpu: int
) -> None:
    assert trained_draft_tokens(spec, on_gpu=True) == on_gpu
    assert trained_draft_tokens(spec, on_gpu=False) == 4
