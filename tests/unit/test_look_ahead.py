"""The pure parts of benchmarks/look_ahead.py: where two texts part, and what drafts would save."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).parents[2] / "benchmarks" / "look_ahead.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("look_ahead", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["look_ahead"] = module
    spec.loader.exec_module(module)
    return module


look_ahead = load()
texts = st.lists(st.integers(0, 2), max_size=40)
OLD = list(range(20))


@pytest.mark.parametrize(
    ("old", "new", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),  # the old text ended
        ([1, 2, 3], [1, 2], 2),  # the new text ended
        ([], [], None),
    ],
)
def test_texts_part_at_the_first_difference(
    old: list[int], new: list[int], position: int | None
) -> None:
    assert look_ahead.first_difference(old, new) == position


def test_equal_texts_are_drafted_from_the_same_position() -> None:
    assert look_ahead.places(OLD, OLD) == OLD
    assert look_ahead.engine_steps(OLD, OLD, 4) == 4  # 5 tokens each
    assert look_ahead.engine_steps(OLD, OLD, 8) == 3


def test_a_substitution_is_found_again_after_four_tokens() -> None:
    new = [*OLD[:5], 99, *OLD[6:]]
    assert look_ahead.places(OLD, new)[6:11] == [None] * 4 + [10]
    found = look_ahead.compare(OLD, new, [])
    assert found["first_difference"] == 5
    assert found["tokens_after"] == found["same_position"] == 14
    assert found["by_match"] == 10  # without the four tokens of the match
    # 5 tokens, the substitution after no draft token, four without drafts, then two drafts of 4.
    assert look_ahead.engine_steps(OLD, new, 4) == 1 + 1 + 4 + 2


def test_an_insertion_is_found_again_at_another_position() -> None:
    new = [*OLD[:5], 99, *OLD[5:]]
    found = look_ahead.compare(OLD, new, [])
    assert look_ahead.places(OLD, new)[10] == 9
    assert found["same_position"] == 0
    assert found["by_match"] == 11  # 15 tokens follow, four of them for the match


def test_of_several_matches_the_longest_counts_and_then_the_nearest() -> None:
    old = [7, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 9, 9, 9, 1, 2, 3, 4, 70]
    assert look_ahead.places(old, [0, 0, 0, 8, 1, 2, 3, 4, 0])[8] == 11
    assert look_ahead.places(old, [5, 5, 5, 5, 5, 5, 5, 5, 5, 1, 2, 3, 4, 0])[13] == 11
    assert look_ahead.places(old, [5, 1, 2, 3, 0])[4] is None  # three tokens are too few


def test_text_behind_the_end_of_the_old_one_has_no_draft() -> None:
    assert look_ahead.places([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])[4:] == [None, None]
    assert look_ahead.engine_steps([], [1, 2, 3], 4) == 3


@given(texts, texts, st.integers(1, 8))
def test_drafts_save_engine_steps_and_never_cost_any(
    old: list[int], new: list[int], length: int
) -> None:
    steps = look_ahead.engine_steps(old, new, length)
    assert -(-len(new) // (length + 1)) <= steps <= len(new)


@given(texts, texts)
def test_matches_are_what_a_search_finds(old: list[int], new: list[int]) -> None:
    for position, place in enumerate(look_ahead.places(old, new)):
        ends = [
            q
            for q in range(4, len(old))
            if position >= 4 and old[q - 4 : q] == new[position - 4 : position]
        ]
        if position < len(old) and (old[:position] == new[:position] or position in ends):
            assert place == position
        else:
            assert place in ends if ends else place is None


def test_tokens_are_counted_by_the_entropy_of_the_old_policy() -> None:
    found = look_ahead.by_entropy(
        {
            "entropy": np.array([0.05, 0.2, 0.3, 5.0]),
            "kl": np.array([0.0, 0.1, 0.2, 0.3]),
            "tv": np.array([0.0, 0.2, 0.0, 0.5]),
            "agrees": np.array([True, False, True, True]),
            "redrawn": np.array([True, True, True, True]),
        }
    )
    assert [of["tokens"] for of in found] == [1, 2, 0, 0, 0, 1]
    assert [of["agreed"] for of in found] == [1, 1, 0, 0, 0, 1]
    assert found[1]["kl"] == pytest.approx(0.3)
    assert found[1]["bound"] == pytest.approx(0.8 / 1.2 + 1)
