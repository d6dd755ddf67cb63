"""Every answer is written once, before it is used, whatever dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tlt.agents import journal
from tlt.agents.environment import Answer
from tlt.agents.journal import LOST, answered_once, entry, forget, kept, lost, read, settle

STATE = bytes(range(256))


def an_answer(text: str = "7") -> Answer:
    return Answer((text, "8"), STATE, done=True, reward=0.5, num_errors=1, seconds=0.25)


def never() -> Answer:
    raise AssertionError("the tool is called twice")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return entry(tmp_path, "3/00001/0002", 1, "a turn")


def test_every_turn_has_a_file_of_its_own(tmp_path: Path) -> None:
    places = [
        *(("3/00001/0002", 1, "text"), ("3/00001/0002", 2, "text"), ("3/00001/0003", 1, "text")),
        *(("3/00001/0002", 1, "another text"), ("3/00001/0002", 1, "\ud800")),
    ]
    paths = [entry(tmp_path, *place) for place in places]
    assert len(set(paths)) == len(places)
    assert paths == [entry(tmp_path, *place) for place in places]
    assert {each.parent.parent for each in paths} == {tmp_path}


def test_an_answer_is_read_as_it_was_written(path: Path) -> None:
    assert read(path) is None
    assert answered_once(path, STATE, an_answer) == an_answer()
    assert read(path) == an_answer()
    assert answered_once(path, STATE, never) == an_answer()
    assert {each.suffix for each in path.parent.iterdir()} == {".json", ".begun"}


def test_the_first_answer_of_a_turn_counts(path: Path) -> None:
    assert settle(path, lost(STATE, "too slow")).messages == ("too slow",)
    assert settle(path, an_answer()).messages == ("too slow",)
    assert answered_once(path, STATE, never).messages == ("too slow",)


def test_work_that_may_be_done_twice_leaves_no_mark(path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        kept(path, lambda: an_answer(str(1 / 0)))
    assert kept(path, an_answer) == an_answer()
    assert kept(path, never) == an_answer()


DIES = """
import os, signal, sys, time
from pathlib import Path
from tlt.agents.journal import answered_once

def work():
    Path(sys.argv[2]).write_text("called")
    if sys.argv[3] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

answered_once(Path(sys.argv[1]), b"before", work)
"""


def started(path: Path, called: Path, how: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", DIES, str(path), str(called), how])
    deadline = time.monotonic() + 30
    while not called.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_the_answer_of_a_process_that_died_with_the_call_is_lost(
    path: Path, tmp_path: Path
) -> None:
    """Between the mark and the answer, the tool may have done anything."""
    process = started(path, tmp_path / "called", "dies")
    assert process.wait(30) == -signal.SIGKILL
    assert read(path) is None
    found = answered_once(path, b"before", never)
    assert found == Answer((LOST,), b"before", done=False, reward=None, num_errors=1)
    assert answered_once(path, b"after", never) == found, "and stays lost"


def test_a_call_under_way_is_waited_for(path: Path, tmp_path: Path) -> None:
    """A run that resumes meets the call of the run that was killed."""
    process = started(path, tmp_path / "called", "waits")
    found: list[Answer] = []
    waiting = threading.Thread(target=lambda: found.append(answered_once(path, b"x", never)))
    waiting.start()
    time.sleep(0.3)
    assert not found
    process.kill()
    process.wait()
    waiting.join(10)
    assert found[0].messages == (LOST,)


def both(work: Callable[[], Answer], path: Path) -> list[Answer]:
    found: list[Answer] = []
    both = [
        threading.Thread(target=lambda: found.append(answered_once(path, STATE, work)))
        for _ in range(8)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join(10)
    return found


def test_of_several_callers_at_once_one_calls(path: Path) -> None:
    calls = []

    def work() -> Answer:
        calls.append(1)
        time.sleep(0.1)
        return an_answer()

    assert both(work, path) == [an_answer()] * 8
    assert len(calls) == 1


def test_a_process_that_dies_while_it_writes_leaves_no_half_an_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(KeyboardInterrupt):
        answered_once(path, STATE, an_answer)
    monkeypatch.undo()
    assert read(path) is None
    assert answered_once(path, STATE, never).messages == (LOST,)


def test_old_answers_are_forgotten(tmp_path: Path) -> None:
    for label in ("1", "2", "3", "10", "eval-0", "eval-2", "eval-2-aime", "eval-3", "check"):
        settle(entry(tmp_path / label, "x", 1, ""), an_answer())
    before = {each.name for each in tmp_path.iterdir()}
    forget(tmp_path, 0)
    assert {each.name for each in tmp_path.iterdir()} == before, "evaluation 0 may be done again"
    forget(tmp_path, 2)
    assert {each.name for each in tmp_path.iterdir()} == {"3", "10", "eval-3", "check"}
    forget(tmp_path / "none", 2)
    journal.forget(tmp_path, 10)
    assert {each.name for each in tmp_path.iterdir()} == {"check"}
