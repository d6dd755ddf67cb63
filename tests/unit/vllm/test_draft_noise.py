"""Drafts drawn with the noise of the policy's draws, and how much of it they are drawn with."""

from typing import Any

import numpy as np
import pytest

from tlt.vllm import keyed
from tlt.vllm.v1.draft_noise import LEVELS, NoiseLevels, NoisyDrafts

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


# --- how much of the noise ------------------------------------------------------------------------


def rounds(noisy: NoisyDrafts, policy: Any, drafter: Any, num_rounds: int) -> list[float]:
    """Draft and verify two places of every row; return each round's share of right first drafts.

    Each place has its own logits [K, B, V], whatever text came before.
    """
    num_places, num_rows, _ = policy.shape
    names = [str(row) for row in range(num_rows)]
    keys: Any = np.arange(num_rows).astype(np.uint64)
    scale: Any = np.ones(num_rows, np.float32)
    shares = []
    for index in range(num_rounds):
        position = np.full(num_rows, index * num_places)
        noisy.begin(names, keys, position, scale)
        drafted = np.stack([noisy.draw(drafter[k], np.arange(VOCAB)) for k in range(num_places)], 1)
        drawn = np.stack(
            [
                keyed.draw_drafts(
                    policy[k], np.arange(VOCAB), keys, position + k, scale, NUM_BLOCKS
                )
                for k in range(num_places)
            ],
            1,
        )
        noisy.verified(names, position, drawn)
        shares.append(float((drafted[:, 0] == drawn[:, 0]).mean()))
    return shares


def test_a_drafter_that_knows_the_policy_drafts_with_all_of_the_noise() -> None:
    policy = random_logits(128).reshape(2, 64, VOCAB)
    noisy = NoisyDrafts(2, VOCAB)
    assert rounds(noisy, policy, policy, 8) == [1.0] * 8
    assert [LEVELS[noisy.levels.best(place)] for place in range(2)] == [1.0, 1.0]


def test_a_drafter_that_can_only_guess_drafts_the_likeliest_token() -> None:
    """The policy is sure of a token; the drafter finds it the likeliest, among many others."""
    drafter = random_logits(128, std=0.3).reshape(2, 64, VOCAB)
    policy = np.where(drafter == drafter.max(-1, keepdims=True), 30, 0).astype(np.float32)
    noisy = NoisyDrafts(2, VOCAB)
    shares = rounds(noisy, policy, drafter, 8)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0
    assert LEVELS[noisy.levels.best(0)] == 0.0


def test_candidates_after_the_first_wrong_draft_do_not_count() -> None:
    levels = NoiseLevels(3)
    drafted = np.array([[1, 2, 3]])
    candidates = np.stack([drafted, drafted, [[9, 8, 3]]])  # the last level is right at place 1
    levels.observe(candidates, drafted, np.array([[1, 8, 3, -1]]))
    assert levels.best(0) == 0
    assert levels.best(1) == 2
    assert levels.best(2) == 0, "place 2 followed a token that the policy did not draw"


def test_fewer_tokens_may_be_drawn_than_were_drafted() -> None:
    levels = NoiseLevels(4)
    drafted = np.array([[1, 2, 3, 4]])
    levels.observe(np.stack([drafted + 5, drafted + 5, drafted]), drafted, np.array([[1]]))
    assert levels.best(0) == 2
    assert levels.best(1) == 0


def test_only_drafts_for_the_same_place_of_the_same_request_count() -> None:
    keys: Any = np.zeros(2, np.uint64)
    scale: Any = np.ones(2, np.float32)
    flat = random_logits(2, std=0.1)
    flat[:, 5] = 1.0

    def verify(names: list[str], positions: list[int]) -> int:
        """Return the best level after drafts of which only those at level 0 were right."""
        noisy = NoisyDrafts(1, VOCAB)
        noisy.begin(["a", "b"], keys, np.array([7, 9]), scale)
        noisy.draw(flat, np.arange(VOCAB))
        noisy.verified(names, np.array(positions), np.full((len(names), 1), 5))
        return noisy.levels.best(0)

    assert LEVELS[verify(["b", "a"], [9, 7])] == 0.0
    assert LEVELS[verify(["a"], [7])] == 0.0
    assert LEVELS[verify(["a", "b"], [8, 10])] == 1.0, "these drafts were for other places"
    assert LEVELS[verify(["c", "d"], [7, 9])] == 1.0, "these requests had no drafts"
