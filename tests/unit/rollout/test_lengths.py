"""The forecast of lengths, alone."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.rollout.lengths import LengthForecast, prompt_key


def test_an_epoch_tells_what_the_next_one_brings() -> None:
    forecast = LengthForecast()
    assert forecast.expected("p") is None
    for tokens in (10, 20, 30, 40, 1000):
        forecast.ended("p", tokens)
    assert forecast.expected("p") == 1000  # siblings may become as long
    forecast.rollout_ended()
    assert forecast.expected("p") == 1000
    for tokens in range(10):
        forecast.ended("p", tokens)
    forecast.rollout_ended()
    assert forecast.expected("p") == 8  # the last epoch counts


def test_a_sibling_that_is_longer_corrects_the_last_epoch() -> None:
    forecast = LengthForecast()
    forecast.restore({"p": 100})
    forecast.ended("p", 7)
    assert forecast.expected("p") == 100
    forecast.runs("p", 150)
    assert forecast.expected("p") == 150
    forecast.rollout_ended()
    assert forecast.state() == {"p": 7}  # only what has ended is remembered


def test_the_same_prompt_has_the_same_key_in_every_process() -> None:
    spec = SamplingSpec(max_tokens=8)
    assert prompt_key(SampleRequest("a", (1, 2, 3), spec)) == "77ba1ae68d5afbb4"
    assert prompt_key(SampleRequest("b", (1, 2, 4), spec)) != "77ba1ae68d5afbb4"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.booleans())))
def test_memory_is_bounded_and_survives_a_restart(events: list[tuple[int, int, bool]]) -> None:
    forecast = LengthForecast(max_prompts=4)
    for number, tokens, ends in events:
        forecast.ended(f"p{number}", tokens)
        if ends:
            forecast.rollout_ended()
    forecast.rollout_ended()
    state = forecast.state()
    assert len(state) <= 4
    again = LengthForecast(max_prompts=4)
    again.restore(json.loads(json.dumps(state)))
    assert again.state() == state
    assert list(again.state()) == list(state)  # the same prompts are forgotten next
    assert [again.expected(f"p{n}") for n in range(10)] == [
        forecast.expected(f"p{n}") for n in range(10)
    ]
