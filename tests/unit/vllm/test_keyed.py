"""The keyed sampler's noise and draws: known answers, distributions, independence, reference."""

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("scipy")

from scipy import stats

from tlt.vllm import keyed

MIN_P = 1e-5
"""A correct sampler fails one of these tests in 100,000; the seeds are fixed, so none by chance."""
FAR = 1e-12
"""A wrong sampler gets less than this."""


def draw(
    rows: Any,
    keys: Any,
    positions: Any = 0,
    inverse: Any = 1.0,
    drafts: Any = None,
    logprobs_of: int = keyed.NOTHING,
) -> tuple[Any, Any, Any]:
    """Return tokens, log-probabilities and ranks [B, K+1]; drafts are [B, K], or none at all."""
    num = len(keys)
    drafts = np.zeros((num, 0)) if drafts is None else np.asarray(drafts)
    width = drafts.shape[1] + 1
    tokens = np.full((num, width), -1, np.int32)
    logprobs, ranks = np.zeros((num, width), np.float32), np.zeros((num, width), np.int64)
    keyed.draw_rows(
        np.ascontiguousarray(rows, np.float32),
        np.full(num, width - 1, np.int64),
        drafts.astype(np.int64).ravel(),
        np.asarray(keys, np.uint64),
        np.broadcast_to(np.asarray(positions, np.int64), num).copy(),
        np.broadcast_to(np.asarray(inverse, np.float32), num).copy(),
        logprobs_of,
        tokens,
        logprobs,
        ranks,
    )
    return tokens, logprobs, ranks


def draw_often(row: Any, keys: Any, positions: Any = 0, inverse: float = 1.0) -> Any:
    """Return a token per key, all drawn from the same logits."""
    return draw(np.tile(row, (len(keys), 1)), keys, positions, inverse)[0][:, 0]


def softmax(row: Any, temperature: float = 1.0) -> Any:
    scaled = np.asarray(row, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def fits(tokens: Any, probabilities: Any) -> float:
    """Return the p-value of a chi-squared test; unlikely tokens share a cell."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    cell = np.where(expected > 10, 1 + np.arange(len(expected)), 0)
    _, cell = np.unique(cell, return_inverse=True)
    counts_C, expected_C = np.bincount(cell, counts), np.bincount(cell, expected)
    return float(stats.chisquare(counts_C, expected_C, sum_check=False).pvalue)


def independent(first: Any, second: Any) -> float:
    """Return the p-value of a chi-squared test that two sequences of tokens are independent."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)
    return float(stats.chi2_contingency(table).pvalue)


# --- noise --------------------------------------------------------------------------------------


def test_known_answer_of_philox() -> None:
    """One of the vectors that the authors' own library, Random123, is tested with."""
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    words = keyed.philox(counter, np.uint64(0x299F31D0_A4093822))
    assert [int(word) for word in words] == [0xD16CFE09_94FDCCEB, 0x5001E420_24126EA1]


def test_noise_is_never_zero_or_infinite() -> None:
    largest, smallest = keyed.exponential(np.uint64(0)), keyed.exponential(np.uint64(2**64 - 1))
    assert 0 < smallest < 1e-15
    assert 36 < largest < 40


# --- distribution -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "num", "temperature"), [(3, 100_000, 0.7), (65, 100_000, 1.5), (300, 50_000, 1)]
)
def test_draws_follow_the_softmax(vocabulary: int, num: int, temperature: float) -> None:
    """One block, one token more than a block, and several with an incomplete one."""
    rng = np.random.default_rng(vocabulary)
    row = rng.normal(size=vocabulary) * 1.5
    tokens = draw_often(row, np.arange(num), inverse=1 / temperature)
    assert fits(tokens, softmax(row, temperature)) > MIN_P
    # The test sees a temperature that is off by a tenth.
    assert fits(tokens, softmax(row, temperature * 1.1)) < FAR


def test_draws_of_other_positions_and_seeds_are_independent() -> None:
    """A vocabulary of three blocks, in ten cells of 13 tokens."""
    keys: Any = 2 * np.arange(60_000)
    row = np.random.default_rng(1).normal(size=130)
    first = draw_often(row, keys, 7) // 13
    for other_keys, position in ((keys, 8), (keys + 1, 7), (keys + 2**32, 7)):
        second = draw_often(row, other_keys, position) // 13
        assert independent(first, second) > MIN_P
    # The test sees one shared draw in thirty.
    assert independent(first, np.where(keys % 30 == 0, first, second)) < FAR


# --- edges --------------------------------------------------------------------------------------


def test_very_large_logits() -> None:
    row = np.zeros(100)
    row[[7, 80]] = 1e30
    tokens = draw_often(row, np.arange(20_000))
    assert set(tokens.tolist()) == {7, 80}
    assert (tokens == 7).mean() == pytest.approx(0.5, abs=0.02)
    row[7] = -1e30
    assert (draw_often(row, np.arange(100)) == 80).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_row_without_a_distribution_harms_no_other(value: float) -> None:
    rows = np.random.default_rng(3).normal(size=(3, 130))
    good, _, _ = draw(rows, range(3), logprobs_of=keyed.RAW)
    rows[1] = value
    tokens, _, _ = draw(rows, range(3), logprobs_of=keyed.RAW)
    assert tokens[[0, 2]].tolist() == good[[0, 2]].tolist()
    assert 0 <= tokens[1, 0] < 130


def test_greedy_takes_the_first_of_the_largest_logits() -> None:
    rows = np.random.default_rng(4).normal(size=(64, 333)).astype(np.float32)
    rows[:, 300] = rows.max(1)
    rows[5, :] = 0.0
    tokens, _, ranks = draw(rows, range(64), inverse=0, logprobs_of=keyed.RAW)
    assert tokens[:, 0].tolist() == rows.argmax(1).tolist()
    assert ranks[0, 0] == (rows[0] >= rows[0].max()).sum()


# --- log-probabilities and ranks ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "temperature"), [(65, 0.7), (1000, 1.0), (1000, 0.0), (49_152, 0.7)]
)
def test_logprobs_and_ranks_against_float64(vocabulary: int, temperature: float) -> None:
    rows = (np.random.default_rng(5).normal(size=(20, vocabulary)) * 4).astype(np.float32)
    rows[:, ::3] = -np.inf
    inverse = 1 / temperature if temperature else 0.0
    for logprobs_of, at in ((keyed.RAW, 1.0), (keyed.AT_TEMPERATURE, temperature or 1.0)):
        tokens, logprobs, ranks = draw(rows, range(20), 0, inverse, logprobs_of=logprobs_of)
        for row, token, logprob, rank in zip(rows, tokens, logprobs, ranks, strict=True):
            assert logprob[0] == pytest.approx(math.log(softmax(row, at)[token[0]]), abs=3e-6)
            assert rank[0] == (row >= row[token[0]]).sum()


# --- rows and drafts ----------------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    rng = np.random.default_rng(6)
    rows = (rng.normal(size=(64, 3, 777)) * 3).astype(np.float32)
    keys, positions = rng.integers(0, 2**63, 64), rng.integers(0, 5000, 64)
    inverse = rng.choice([0, 0.5, 1, 1 / 0.7], 64).astype(np.float32)
    drafts = rows[:, :2].argmax(-1)
    whole = draw(rows.reshape(-1, 777), keys, positions, inverse, drafts, keyed.AT_TEMPERATURE)
    for i in range(64):
        one = slice(i, i + 1)
        alone = draw(
            rows[i], keys[one], positions[one], inverse[one], drafts[one], keyed.AT_TEMPERATURE
        )
        for got, expected in zip(alone, whole, strict=True):
            assert got[0].tobytes() == expected[i].tobytes()


def test_tokens_are_the_same_with_any_drafts() -> None:
    rng = np.random.default_rng(7)
    num, length = 400, 5
    rows = (rng.normal(size=(num, length, 90)) * 2).astype(np.float32)
    keys = rng.integers(0, 2**63, num)
    expected = np.stack([draw(rows[:, k], keys, k)[0][:, 0] for k in range(length)], 1)
    accepted = []
    for seed in range(4):
        right = np.random.default_rng(seed).random((num, length - 1)) < 0.8
        drafts = np.where(right, expected[:, :-1], (expected[:, :-1] + seed) % 90 - (seed == 0))
        tokens, _, _ = draw(rows.reshape(-1, 90), keys, drafts=drafts)
        # Everything up to the first draft that differs, and nothing behind it.
        reached = np.cumprod(drafts == expected[:, :-1], 1).sum(1)
        for i in range(num):
            known = tokens[i, : reached[i] + 1]
            assert known.tolist() == expected[i, : reached[i] + 1].tolist()
            assert (tokens[i, reached[i] + 1 :] == -1).all()
        accepted.append(reached.mean())
    assert min(accepted) > 1


# --- reference ----------------------------------------------------------------------------------


def gumbel(key: int, position: int, purpose: int, index: int) -> float:
    bits = int(keyed.philox((index >> 1, position, purpose, 0), np.uint64(key))[index & 1])
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def block_scores(row: Any, key: int, position: int, temperature: float) -> list[float]:
    """Return what a block is drawn by, in float64."""
    logits = np.asarray(row, np.float64) / temperature
    sums = [np.logaddexp.reduce(logits[i : i + 64]) for i in range(0, len(logits), 64)]
    return [total + gumbel(key, position, 0, i) for i, total in enumerate(sums)]


def token_scores(row: Any, key: int, position: int, temperature: float, block: int) -> list[float]:
    """Return what a token of a block is drawn by, in float64."""
    tokens = range(64 * block, min(64 * block + 64, len(row)))
    return [float(row[i]) / temperature + gumbel(key, position, 1, i) for i in tokens]


def plain_draw(row: Any, key: int, position: int, temperature: float) -> int:
    """Draw by the definition: first the block, then its token."""
    block = int(np.argmax(block_scores(row, key, position, temperature)))
    return 64 * block + int(np.argmax(token_scores(row, key, position, temperature, block)))


@pytest.mark.parametrize(("vocabulary", "num"), [(64, 300), (65, 300), (300, 300), (49_152, 40)])
def test_the_reference_draws_the_same_tokens(vocabulary: int, num: int) -> None:
    """The scheme is fixed: a run of an earlier version can be repeated."""
    rng = np.random.default_rng(vocabulary)
    rows = (rng.normal(size=(num, vocabulary)) * 2).astype(np.float32)
    rows[::2, rng.integers(0, vocabulary, vocabulary // 3)] = -np.inf
    keys = rng.integers(0, 2**64, num, np.uint64)
    positions = rng.integers(0, 40_000, num)
    temperatures = rng.choice([0.7, 1.0, 1.5], num)
    tokens, _, _ = draw(rows, keys, positions, 1 / temperatures)
    expected = [
        plain_draw(row, int(key), int(position), temperature)
        for row, key, position, temperature in zip(rows, keys, positions, temperatures, strict=True)
    ]
    assert tokens[:, 0].tolist() == expected


# --- shortfall ----------------------------------------------------------------------------------


def shortfall(row: Any, key: int, token: int, inverse: float = 1.0) -> float:
    return float(keyed.shortfall(row, np.uint64(key), 3, np.float32(inverse), token))


def test_the_shortfall_is_what_a_token_and_its_block_lack_in_the_draw() -> None:
    rows = np.random.default_rng(8).normal(size=(10, 150)).astype(np.float32)
    rows[:, 4] = -np.inf
    for key, row in enumerate(rows):
        blocks = block_scores(row, key, 3, 0.7)
        expected: list[float] = []
        for block, score in enumerate(blocks):
            tokens = token_scores(row, key, 3, 0.7, block)
            expected += [max(tokens) - token + max(blocks) - score for token in tokens]
        missed = [shortfall(row, key, token, 1 / 0.7) for token in range(150)]
        assert missed == pytest.approx(expected, abs=1e-5)
        assert missed[draw(row[None], [key], 3, 1 / 0.7)[0][0, 0]] == min(missed) == 0


def test_without_temperature_the_shortfall_is_to_the_largest_logit() -> None:
    row: Any = np.array([1.0, 4.0, -np.inf], np.float32)
    assert [shortfall(row, 1, token, 0.0) for token in range(3)] == [3, 0, math.inf]


# --- drafts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
def test_drafts_are_what_the_policy_would_draw_from_their_logits(reduced: bool) -> None:
    """Every row has its own temperature, and a reduced vocabulary is in any order."""
    rng = np.random.default_rng(12)
    inverse = rng.choice([0.0, 1.0, 1 / 0.7], 500).astype(np.float32)
    token_ids = rng.choice(200, 90, replace=False) if reduced else np.arange(200)
    logits = (rng.normal(size=(500, len(token_ids))) * 2).astype(np.float32)
    rows = np.full((500, 200), -np.inf)
    rows[:, token_ids] = logits
    expected = draw(rows, range(500), 3, inverse)[0][:, 0]
    keys: Any = np.arange(500, dtype=np.uint64)
    positions = np.full(500, 3)
    drafts = keyed.draw_drafts(logits, token_ids, keys, positions, inverse, num_blocks=4)
    assert drafts.tolist() == expected.tolist()
