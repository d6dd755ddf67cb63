"""Packing of sequences into rows of a token budget."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from tlt.packing import epochs, pack


@given(st.lists(st.integers(1, 300), max_size=200), st.integers(1, 400))
def test_every_sequence_is_in_one_row_and_rows_keep_to_the_budget(
    lengths: list[int], budget: int
) -> None:
    rows = pack(lengths, budget)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= budget or len(row) == 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200))
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    used = sorted(sum(lengths[i] for i in row) for row in pack(lengths, 100))
    assert len(used) == 1 or used[0] + used[1] > 100


def test_heavy_tailed_lengths_leave_little_room_unused() -> None:
    rng = random.Random(0)
    lengths = [min(1500, round(60 * 2.7 ** rng.gauss(0, 1.3)) + 1) for _ in range(1000)]
    rows = pack(lengths, 2048)
    assert sum(lengths) / (2048 * len(rows)) > 0.97


def test_epochs_hold_everything_once_and_mix_anew() -> None:
    lengths = [10, 20, 30, 40] * 10
    rows = epochs(lengths, 100, random.Random(0))
    first: list[int] = []
    while len(first) < 40:
        first += next(rows)
    second: list[int] = []
    while len(second) < 40:
        second += next(rows)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
