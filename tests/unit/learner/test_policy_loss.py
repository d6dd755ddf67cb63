"""Advantages and the policy loss against small references."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config.train import AlgorithmConfig
from tlt.learner.advantage import ADVANTAGES, dr_grpo, grpo, rloo

torch = pytest.importorskip("torch")

from tlt.learner.policy_loss import policy_loss  # noqa: E402

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_by_hand() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert rloo([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


@given(REWARDS)
def test_advantages_of_a_group_cancel_out(rewards: list[float]) -> None:
    for advantages in ADVANTAGES.values():
        assert sum(advantages(rewards)) == pytest.approx(0.0, abs=1e-6)


@given(st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_teach_nothing(reward: float, size: int) -> None:
    for advantages in ADVANTAGES.values():
        assert advantages([reward] * size) == pytest.approx([0.0] * size, abs=1e-6)


def reference(token: dict[str, float], settings: AlgorithmConfig) -> float:
    """Return the loss of one token, in plain Python."""
    ratio = math.exp(token["new"] - token["old"])
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    gain = min(ratio * token["advantage"], min(max(ratio, low), high) * token["advantage"])
    importance = min(math.exp(token["old"] - token["engine"]), settings.max_importance)
    difference = token["reference"] - token["new"]
    kl = math.exp(difference) - difference - 1
    return token["weight"] * (settings.kl_weight * kl - importance * gain)


LOGPROB = st.floats(-3, 0)
TOKEN = st.fixed_dictionaries(
    {
        "new": LOGPROB,
        "old": LOGPROB,
        "engine": LOGPROB,
        "reference": LOGPROB,
        "advantage": st.floats(-2, 2),
        "weight": st.floats(0, 1),
    }
)


@given(st.lists(TOKEN, min_size=1, max_size=8), st.sampled_from([0.0, 0.1]))
def test_loss_equals_the_reference(tokens: list[dict[str, float]], kl_weight: float) -> None:
    settings = AlgorithmConfig(kl_weight=kl_weight)
    column = {
        name: torch.tensor([t[name] for t in tokens], dtype=torch.float64) for name in tokens[0]
    }
    result = policy_loss(
        column["new"],
        column["old"],
        column["engine"],
        column["advantage"],
        column["weight"],
        settings,
        column["reference"],
    )
    expected = sum(reference(token, settings) for token in tokens)
    assert result.total.item() == pytest.approx(expected, abs=1e-9)


def test_beyond_the_clip_nothing_is_learned_in_the_same_direction() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    result = policy_loss(new, old, old, advantage, one, AlgorithmConfig())
    result.total.backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False, True, True, False]
    assert result.clipped_tokens == 2


def test_the_gap_between_engine_and_learner_is_seen_and_its_weight_capped() -> None:
    zero = torch.zeros(2)
    engine = torch.tensor([-0.5, -3.0])
    one = torch.ones(2)
    result = policy_loss(zero, zero, engine, one, one, AlgorithmConfig(max_importance=2.0))
    assert result.gap_sum == pytest.approx(3.5)
    assert result.capped_tokens == 1
    assert result.total.item() == pytest.approx(-(math.exp(0.5) + 2.0))
