"""Which problems an RL step starts, and what long responses lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config.train import AlgorithmConfig
from tlt.train.dapo import Replacements, overlong_penalty


def play(signals: list[bool], num_wanted: int, order: list[float]) -> set[int]:
    """Complete the groups in some order; return the problems that were started."""
    replacements = Replacements(num_wanted, len(signals))
    started, ended = set(range(num_wanted)), set[int]()
    while running := started - ended:
        number = min(running, key=lambda n: order[n])
        ended.add(number)
        if not signals[number]:
            replacements.observe(number)
        new = set(replacements.decide())
        assert not new & started
        started |= new
    return started


@given(st.data())
def test_the_order_of_groups_does_not_change_which_problems_start(data: st.DataObject) -> None:
    signals = data.draw(st.lists(st.booleans(), min_size=1, max_size=30))
    num_wanted = data.draw(st.integers(1, len(signals)))
    orders = st.lists(st.floats(0, 1), min_size=len(signals), max_size=len(signals))
    started = play(signals, num_wanted, data.draw(orders))
    # The shortest prefix with enough groups that have a signal; else all.
    fitting = (n for n in range(len(signals)) if sum(signals[:n]) == num_wanted)
    assert started == set(range(next(fitting, len(signals))))


def test_without_extra_problems_nothing_is_replaced() -> None:
    replacements = Replacements(2, 2)
    replacements.observe(0)
    assert not replacements.are_left
    assert not replacements.decide()


def test_the_penalty_is_linear_in_the_last_tokens() -> None:
    algorithm = AlgorithmConfig(overlong_tokens=20, overlong_penalty=0.5)
    lost = [overlong_penalty(tokens, 100, algorithm) for tokens in (1, 80, 85, 100)]
    assert lost == pytest.approx([0, 0, 0.125, 0.5])
    assert overlong_penalty(100, 100, AlgorithmConfig()) == 0
