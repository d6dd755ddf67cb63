"""Look-ahead: what is generated ahead, for how long, and who gets the texts."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import Sample, SampleRequest, SamplingSpec
from tlt.rollout.ahead import (
    FIRST_AGREEMENT,
    FIRST_S,
    MIN_AGREEMENT,
    AheadText,
    LookAhead,
    common_length,
)
from tlt.rollout.lengths import LengthForecast, prompt_key


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, prompt: int = 1, seed: int | None = 3, **sampling: Any) -> SampleRequest:
    spec = SamplingSpec(**({"max_tokens": 50} | sampling), seed=seed)
    return SampleRequest(name, (prompt,), spec, rl_step=2)


def text(name: str, tokens: Sequence[int]) -> AheadText:
    return AheadText(f"ahead/{name}", array("i", tokens))


def sample(name: str, tokens: Sequence[int]) -> Sample:
    return Sample(name, tuple(tokens), (), "stop", "engine-0", 0, 0.0, 0.0, 0.0)


def names(requests: Sequence[SampleRequest]) -> list[str]:
    return [r.sample_id for r in requests]


def looking(max_tokens: int = 1000) -> tuple[LookAhead, Clock]:
    clock = Clock()
    return LookAhead(LengthForecast(), clock, max_tokens), clock


def test_a_request_ahead_has_the_noise_of_its_sample_and_is_no_sample() -> None:
    ahead, _ = looking()
    own = SampleRequest("2/00001/0003", (4, 5), SamplingSpec(9, 0.7, seed=77), rl_step=2)
    ahead.plan([own])
    [made] = ahead.next(8)
    assert made == SampleRequest(
        "ahead/2/00001/0003", (4, 5), SamplingSpec(9, 0.7, seed=77, logprobs=False), rl_step=None
    )
    assert ahead.next(8) == []


def test_the_order_of_dispatch_counts_where_no_length_is_known() -> None:
    ahead, _ = looking()
    ahead.plan(request(str(i), prompt=i) for i in range(5))
    assert names(ahead.next(2)) == ["ahead/0", "ahead/1"]
    assert names(ahead.next(9)) == ["ahead/2", "ahead/3", "ahead/4"]


def test_the_longest_come_first() -> None:
    forecast = LengthForecast()
    for prompt, tokens in ((1, 30), (2, 10), (3, 90)):
        forecast.ended(prompt_key(request("", prompt)), tokens)
    forecast.rollout_ended()
    ahead = LookAhead(forecast, Clock())
    requests = [request(f"{prompt}", prompt) for prompt in (1, 2, 3, 4)]
    ahead.plan([*requests, request("forced", 2, max_tokens=45, ignore_eos=True)])
    # Nothing is known of prompt 4, and prompt 3 was cut off: as long as can be.
    turn = ahead.next(9)
    assert names(turn) == [f"ahead/{n}" for n in ("3", "4", "forced", "1")]
    assert ahead.next(9, turn) == [], "far shorter ones would only slow the others down"
    another = ahead.next(9)
    assert names(another) == ["ahead/2"], "another engine takes what is left"
    ahead.turn_ended(another)
    ahead.ended([text(name, [7]) for name in ("3", "4", "forced", "1")], 0.5)
    assert names(ahead.next(9)) == ["ahead/2"]


def test_a_sample_without_a_seed_has_no_noise_to_share() -> None:
    ahead, _ = looking()
    ahead.plan([request("a", seed=None), request("b")])
    assert names(ahead.next(1)) == ["ahead/b"]


def test_what_never_began_is_left_to_other_engines_until_the_rollout_ends() -> None:
    ahead, _ = looking()
    ahead.plan(request(str(i), prompt=i) for i in range(4))
    given = ahead.next(3)
    ahead.ended([text("0", [1]), text("2", [])], 0.5)
    ahead.turn_ended(given)
    assert names(ahead.next(9)) == ["ahead/1", "ahead/2", "ahead/3"]
    ahead.rollout_ended()
    ahead.turn_ended(given)
    assert ahead.next(9) == []


def test_texts_go_to_the_engine_of_their_sample_until_it_has_ended() -> None:
    ahead, _ = looking()
    requests = [request(name) for name in "abc"]
    ahead.plan(requests)
    ahead.next(9)
    ahead.ended([text("a", [1, 2, 3]), text("b", [])], 0.5)
    ahead.rollout_ended()
    ahead.rollout_started([SampleRequest("eval", (1,), SamplingSpec(5))])
    ahead.rollout_started(requests)
    [lesson] = ahead.lessons(requests)
    assert lesson.sample_id == "a"
    assert (lesson.prompt_token_ids, lesson.response.tolist(), lesson.start) == ((1,), [1, 2, 3], 0)
    assert ahead.lessons(requests) == [lesson], "also to a second engine, if the first is lost"
    ahead.finished(sample("a", [1, 2, 9, 9]))
    assert ahead.lessons(requests) == []


def test_texts_of_samples_that_do_not_come_are_dropped() -> None:
    ahead, _ = looking()
    ahead.ended([text("a", [1, 2, 3])], 0.5)
    ahead.rollout_started([request("b")])
    assert ahead.lessons([request("a")]) == []


def test_samples_that_are_under_way_are_not_generated_ahead() -> None:
    ahead, _ = looking()
    ahead.plan([request("a"), request("b")])
    ahead.rollout_started([request("a")])
    assert names(ahead.next(9)) == ["ahead/b"]


def test_memory_is_bounded() -> None:
    ahead, _ = looking(max_tokens=10)
    requests = [request(str(i), prompt=i) for i in range(9)]
    ahead.plan(requests)
    assert len(ahead.next(2)) == 2
    ahead.ended([text("0", [1] * 6), text("1", [1] * 6)], 0.5)
    assert ahead.next(2) == []
    ahead.finished(sample("0", [1]))
    assert len(ahead.next(2)) == 2


def test_counts() -> None:
    ahead, _ = looking()
    ahead.ended([text("a", [1, 2, 3]), text("b", [1, 2])], 0.5)
    assert ahead.record() == {"ahead/texts": 2, "ahead/tokens": 5, "ahead/engine_s": 0.5}
    ahead.finished(sample("a", [1, 2, 9, 9]))
    ahead.finished(sample("b", [1, 2, 9, 9]))
    ahead.finished(sample("c", [1]))
    ahead.rollout_ended()
    ahead.rollout_ended()  # of an evaluation
    assert ahead.record() == {
        **{"ahead/texts": 0, "ahead/tokens": 0, "ahead/engine_s": 0},
        "ahead/repeated_share": 4 / 5,
    }
    assert ahead.agreement == 4 / 5
    assert "ahead/repeated_share" not in ahead.record()


def test_harvest_gets_what_agreement_leaves_of_an_idle_spell() -> None:
    ahead, clock = looking()
    ahead.idle("e")
    assert ahead.seconds_left("e") == FIRST_AGREEMENT * FIRST_S
    clock.now_s += 1.0
    ahead.idle("e")
    assert ahead.seconds_left("e") == FIRST_AGREEMENT * FIRST_S - 1.0, "since it became idle"
    clock.now_s += 19.0
    ahead.rollout_ended()
    ahead.ended([text("a", range(10))], 0.5)
    ahead.finished(sample("a", [*range(9), 99]))
    ahead.rollout_ended()
    ahead.idle("e")
    assert ahead.seconds_left("e") == pytest.approx(0.9 * 20.0)
    ahead.needed("e")
    ahead.needed("e")
    for _ in range(30):
        ahead.ended([text("a", range(100))], 0.5)
        ahead.finished(sample("a", [99]))
        ahead.rollout_ended()
        ahead.idle("e")
        clock.now_s += 20.0
    assert ahead.agreement == 0
    ahead.rollout_ended()
    ahead.idle("e")
    assert ahead.seconds_left("e") == pytest.approx(MIN_AGREEMENT * 20.0), "to notice a change"


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_length(one: list[int], two: list[int]) -> None:
    length = common_length(one, two)
    assert one[:length] == two[:length]
    assert one[: length + 1] != two[: length + 1] or length == len(one) == len(two)
