"""What a recheck notes of the draws that differ from the tokens expected."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.sample.sampler import Sampler

from tlt.vllm.v1.sampler import DrawMargins, KeyedSampler
from tlt.vllm.v1.selftest import sampling_metadata

VOCAB = 100
NUM_TOKENS = 30


class Keys:
    """One request with a seed of 7."""

    position = 0
    watch: Any = None

    def of_batch(self, num_requests: int) -> tuple[Any, Any]:
        return np.array([7], np.uint64), np.array([self.position], np.int64)


def draw(sampler: KeyedSampler, logits_TV: torch.Tensor, keys: Keys) -> list[int]:
    tokens = []
    for keys.position, row_V in enumerate(logits_TV):
        out = sampler(logits=row_V[None], sampling_metadata=sampling_metadata(torch.tensor([0.7])))
        tokens.append(int(out.sampled_token_ids[0, 0]))
    return tokens


def test_the_first_draw_that_differs_is_noted_with_its_shortfall() -> None:
    keys = Keys()
    sampler = KeyedSampler(keys, Sampler())
    logits_TV = torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = draw(sampler, logits_TV, keys)

    equal = DrawMargins(keys, expected)
    assert draw(sampler, logits_TV, keys) == expected
    assert equal.end() == {}

    other = list(expected)
    other[4], other[9] = (expected[4] + 1) % VOCAB, (expected[9] + 1) % VOCAB
    differing = DrawMargins(keys, other)
    draw(sampler, logits_TV, keys)
    missed = differing.end()
    assert list(missed) == [4]
    assert 0 < missed[4] < 50
    # With so much more weight, and a little, the token expected would have been drawn.
    for extra, drawn in ((-1e-3, expected[4]), (1e-3, other[4])):
        logits_TV[4, other[4]] += 0.7 * (missed[4] + extra)
        assert draw(sampler, logits_TV, keys)[4] == drawn
        logits_TV[4, other[4]] -= 0.7 * (missed[4] + extra)


def test_a_draw_while_the_prompt_is_still_read_is_forgotten() -> None:
    keys = Keys()
    sampler = KeyedSampler(keys, Sampler())
    first_V, second_V = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    [expected] = draw(sampler, second_V[None], keys)
    assert draw(sampler, first_V[None], keys) != [expected]
    missed = DrawMargins(keys, [expected])
    draw(sampler, first_V[None], keys)
    draw(sampler, second_V[None], keys)
    assert missed.end() == {}
