"""Word problems and their retold solutions."""

import random
import re
import string

import pytest

from tlt.tasks.stories import tell

MORE = "brought|added|delivered|returned"


def total_of(question: str) -> int:
    """Work the problem out from the question alone."""
    opening, *events, _ = re.split(r"(?<=[.?]) ", question)
    numbers = [int(re.findall(r"\d+", sentence)[0]) for sentence in (opening, *events)]
    signs = [1 if re.search(rf"\b({MORE})\b", sentence) else -1 for sentence in events]
    return numbers[0] + sum(s * n for s, n in zip(signs, numbers[1:], strict=True))


@pytest.mark.parametrize("num_events", [1, 2, 5, 40])
def test_the_question_and_its_solution_lead_to_the_answer(num_events: int) -> None:
    for seed in range(100):
        story = tell(num_events, random.Random(seed), max_change=9, max_total=30, check_share=0)
        assert total_of(story.question) == story.answer
        sentences = re.split(r"(?<=\.) ", story.worked)
        assert len(sentences) == num_events
        assert str(story.answer) in re.findall(r"\d+", sentences[-1])
        assert 0 <= story.answer <= 30


def test_a_story_follows_from_its_generator() -> None:
    assert tell(3, random.Random(1)) == tell(3, random.Random(1))
    assert tell(3, random.Random(1)) != tell(3, random.Random(2))


def test_a_check_tells_every_event_again_and_solutions_differ_in_length() -> None:
    once = [tell(3, random.Random(seed), check_share=0) for seed in range(200)]
    checked = [tell(3, random.Random(seed), check_share=0.5) for seed in range(200)]
    sentences = [[len(re.split(r"(?<=\.) ", s.worked)) for s in told] for told in (once, checked)]
    assert set(sentences[0]) == {3}
    assert {3, 7, 11} <= set(sentences[1]) <= {3 + 4 * n for n in range(20)}
    assert [s.question for s in once] == [s.question for s in checked]
    for story in checked:
        assert str(story.answer) in re.findall(r"\d+", re.split(r"(?<=\.) ", story.worked)[-1])


def test_the_texts_are_clean() -> None:
    allowed = set(string.ascii_letters + string.digits + " .,;:?'+-=")
    for seed in range(300):
        story = tell(6, random.Random(seed))
        for text in (story.question, story.worked):
            assert set(text) <= allowed
            assert "  " not in text
            assert text[0] == text[0].upper()


def test_solutions_seldom_repeat_each_other() -> None:
    """Of five words in a row, few have been written in the hundred solutions before."""
    seen: set[tuple[str, ...]] = set()
    repeated = []
    for seed in range(200):
        words = tell(4, random.Random(seed)).worked.split()
        runs = list(zip(*(words[i:] for i in range(5)), strict=False))
        if seed >= 100:
            repeated.append(sum(run in seen for run in runs) / len(runs))
        seen.update(runs)
    assert sum(repeated) / len(repeated) < 0.1
