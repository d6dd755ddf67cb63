"""Responses by prompt: who should learn what, and what is kept."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import Sample, SampleRequest, SamplingSpec
from tlt.rollout.texts import KEPT, OVERLAP, Inbox, Lesson, Texts

SPEC = SamplingSpec(max_tokens=99)


def request(name: str, prompt: int = 1, rl_step: int | None = 3) -> SampleRequest:
    return SampleRequest(name, (prompt, 2), SPEC, rl_step=rl_step)


def sample(name: str, engine: str, *tokens: int) -> Sample:
    return Sample(name, tokens, (), "stop", engine, 0, 0.0, 0.0, 0.0)


def texts_of(max_bytes: int, *engines: str) -> Texts:
    texts = Texts(max_bytes)
    for engine in engines:
        texts.engine_ready(engine)
    return texts


def test_the_other_engines_of_a_group_learn_a_response() -> None:
    texts = texts_of(10_000, *"xyz")
    requests = {name: request(name) for name in "abc"} | {"d": request("d", prompt=5)}
    texts.rollout_started(requests.values())
    for engine, name in (("x", "a"), ("y", "b"), ("z", "d")):
        assert texts.assigned(engine, [requests[name]]) == []
    found = texts.finished(sample("a", "x", 7, 8, 9))
    assert found is not None
    lesson, others = found
    assert others == {"y"}
    assert lesson == Lesson((1, 2), array("i", [7, 8, 9]))
    # An engine that gets its first request of the prompt learns what has ended so far.
    assert texts.assigned("z", [requests["c"]]) == [lesson]
    assert texts.assigned("z", [requests["c"]]) == []
    texts.engine_lost("z")
    assert texts.assigned("z", [requests["c"]]) == []
    texts.engine_ready("z")
    assert texts.assigned("z", [requests["c"]]) == [lesson]
    assert texts.finished(sample("a", "x", 7, 8, 9)) is None  # only once


def test_running_responses_are_handed_over_in_parts() -> None:
    texts = texts_of(10_000, *"xyz")
    requests = {name: request(name) for name in "abc"} | {"d": request("d", prompt=5)}
    texts.rollout_started(requests.values())
    texts.assigned("x", [requests["a"], requests["d"]])
    assert texts.wanted("x") == {}  # nobody else has the prompts
    texts.assigned("y", [requests["b"]])
    assert texts.wanted("x") == {"a": 0}
    assert texts.wanted("y") == {"b": 0}
    part = array("i", range(50))
    assert texts.grown("x", "a", 0, part) == (Lesson((1, 2), part), {"y"})
    assert texts.wanted("x") == {"a": 50 - OVERLAP}
    found = texts.finished(sample("a", "x", *range(90)))
    assert found == (Lesson((1, 2), array("i", range(50 - OVERLAP, 90)), 50 - OVERLAP), {"y"})
    assert texts.grown("x", "a", 50, part) is None  # too late
    # A request that another engine finishes, and a lost engine, want nothing.
    texts.assigned("x", [requests["c"]])
    texts.assigned("y", [requests["c"]])
    texts.finished(sample("c", "y", 1))
    assert texts.wanted("x") == {}
    texts.engine_lost("y")
    assert texts.wanted("y") == {}
    # What is kept is the whole response.
    assert texts.assigned("z", [requests["b"]])[0].response == array("i", range(90))
    texts.rollout_ended()
    assert texts.wanted("z") == {}


def test_the_newest_responses_survive_epochs_and_processes() -> None:
    texts = texts_of(10_000, "x")
    for epoch in range(KEPT + 2):
        texts.rollout_started([request(f"{epoch}")])
        texts.assigned("x", [request(f"{epoch}")])
        texts.finished(sample(f"{epoch}", "x", epoch, epoch))
        texts.rollout_ended()
    again = texts_of(10_000, "y")
    again.restore(texts.state())
    assert again.num_bytes == texts.num_bytes
    again.rollout_started([request("next")])
    newest = [Lesson((1, 2), array("i", [n, n])) for n in range(2, KEPT + 2)]
    assert again.assigned("y", [request("next")]) == newest


def test_samples_that_nobody_trains_on_are_not_kept() -> None:
    """Nor does an engine learn that drafts no n-grams."""
    cases = ((texts_of(10_000, "x"), None), (texts_of(0, "x"), 3), (texts_of(10_000), 3))
    for texts, rl_step in cases:
        texts.rollout_started([request("a", rl_step=rl_step)])
        assert texts.assigned("x", [request("a", rl_step=rl_step)]) == []
        assert texts.finished(sample("a", "x", 1)) is None
        assert texts.num_bytes == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=60),
    st.integers(1, 5_000),
)
def test_memory_is_bounded(ended: list[tuple[int, int]], max_bytes: int) -> None:
    texts = texts_of(max_bytes, "x")
    for number, (prompt, tokens) in enumerate(ended):
        texts.rollout_started([request(f"{number}", prompt)])
        texts.finished(sample(f"{number}", "x", *range(tokens)))
        assert texts.num_bytes <= max_bytes
    again = Texts(max_bytes)
    again.restore(texts.state())
    assert (again.num_bytes, again.state()) == (texts.num_bytes, texts.state())


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{", b"[1]\n", b'{"a": 3}\n', b'{"a": [2]}\n1234', b'{"a": ["x"]}\n', b"\xff\n"],
)
def test_damaged_texts_are_refused_whole(damaged: bytes) -> None:
    texts = texts_of(10_000, "x")
    with pytest.raises(ValueError):
        texts.restore(damaged)
    assert texts.num_bytes == 0


@given(st.lists(st.one_of(st.integers(0, 400), st.none()), max_size=60))
def test_an_inbox_is_bounded_and_keeps_the_newest(sizes: list[int | None]) -> None:
    inbox, waiting = Inbox(1_000), list[Lesson]()
    for size in sizes:
        if size is not None:
            waiting.append(Lesson((1,), array("i", range(size))))
            inbox.put(waiting[-1:])
        else:
            taken = inbox.take(300)
            assert sum(lesson.num_tokens for lesson in taken) <= 300 or len(taken) == 1
            assert bool(taken) == bool(waiting)
            # What is left are the newest, in their order.
            while waiting and taken and waiting[0] is not taken[0]:
                waiting.pop(0)
            assert waiting[: len(taken)] == taken
            del waiting[: len(taken)]
        assert len(inbox) <= len(waiting)
    left = [lesson for _ in sizes for lesson in inbox.take(1_000)]
    assert sum(lesson.num_tokens for lesson in left) <= 1_000
    assert left == waiting[len(waiting) - len(left) :]
