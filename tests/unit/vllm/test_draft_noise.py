"""Drafts drawn with the noise of the policy's draws."""

from typing import Any

import numpy as np
import pytest

from tlt.vllm import keyed

VOCAB = 300
NUM_BLOCKS = -(-VOCAB // keyed.BLOCK)


def noise(num_rows: int) -> tuple[Any, Any]:
    """Return the seed and the position of each row: many seeds, many positions."""
    rows = np.arange(num_rows)
    return (rows // 7 + 1).astype(np.uint64), rows % 7 * 11


def policy_draws(logits: Any, inverse: Any) -> Any:
    keys, positions = noise(len(logits))
    tokens: Any = np.zeros((len(logits), 1), np.int32)
    none: Any = np.zeros(len(logits), np.int64)
    unused: Any = np.zeros((len(logits), 1), np.float32)
    ranks: Any = np.zeros((len(logits), 1), np.int64)
    keyed.draw_rows(
        logits, none, none, keys, positions, inverse, keyed.NOTHING, tokens, unused, ranks
    )
    return tokens[:, 0]


def drafts(logits: Any, inverse: Any, token_ids: Any = None) -> Any:
    keys, positions = noise(len(logits))
    tokens: Any = np.arange(VOCAB) if token_ids is None else token_ids
    return keyed.draw_drafts(logits, tokens, keys, positions, inverse, NUM_BLOCKS)


def random_logits(num_rows: int, std: float = 2.0, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(0, std, (num_rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("inverse", [0.0, 1.0, 1 / 0.7])
def test_drafts_from_the_policys_logits_are_the_policys_draws(inverse: float) -> None:
    logits = random_logits(3000)
    scale: Any = np.full(len(logits), inverse, np.float32)
    assert (drafts(logits, scale) == policy_draws(logits, scale)).all()


def test_every_row_has_its_own_temperature() -> None:
    logits = random_logits(900)
    scale: Any = np.tile(np.array([0.0, 1.0, 2.0], np.float32), 300)
    drafted = drafts(logits, scale)
    assert (drafted == policy_draws(logits, scale)).all()
    assert (drafted[::3] == logits[::3].argmax(-1)).all()


def test_a_reduced_vocabulary_in_any_order_drafts_what_it_holds() -> None:
    """Without the tokens of one block, a draft differs only where the policy draws one of them."""
    logits = random_logits(3000)
    scale: Any = np.ones(len(logits), np.float32)
    drawn = policy_draws(logits, scale)
    kept = np.random.default_rng(1).permutation(
        [token for token in range(VOCAB) if token // keyed.BLOCK != 2]
    )
    drafted = drafts(np.ascontiguousarray(logits[:, kept]), scale, kept)
    has_it = np.isin(drawn, kept)
    assert 0.5 < has_it.mean() < 0.95
    assert (drafted == drawn)[has_it].all()
    assert np.isin(drafted, kept).all()


@pytest.mark.parametrize("distance", [0.1, 0.5, 1.0, 2.0])
def test_agreement_is_at_least_what_the_total_variation_allows(distance: float) -> None:
    """The bound of two draws with the same noise is (1 - TV) / (1 + TV), here for the mean."""
    num_rows = 6000
    policy = random_logits(num_rows)
    drafter = policy + random_logits(num_rows, distance, seed=5)
    scale: Any = np.ones(num_rows, np.float32)

    def probs(logits: Any) -> Any:
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    variation = np.abs(probs(policy) - probs(drafter)).sum(-1) / 2
    bound = ((1 - variation) / (1 + variation)).mean()
    agree = (drafts(drafter, scale) == policy_draws(policy, scale)).mean()
    assert agree > bound - 3 * (bound * (1 - bound) / num_rows) ** 0.5
    assert agree < 1 - variation.mean() + 0.02  # no draw of both can agree more often
