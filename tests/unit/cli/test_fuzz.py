"""Seeded bad input through the `tlt` command itself: no file and no value ends in a traceback.

Every command either works or refuses: exit code 2 and a message that names the key or file, what is
wrong, and a way out. No engine and no Ray start. `TLT_FUZZ_INPUTS` sets the number of inputs.
"""

import contextlib
import io
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from bad_input import KINDS, Attempt, World, sound_world
from damage import harm_file

from tlt.cli.main import run
from tlt.contracts import Sample, SampleRequest
from tlt.errors import ConfigError
from tlt.rollout.client import Engine
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import Reward
from tlt.train.folder import RunFolder

NUM_INPUTS = int(os.environ.get("TLT_FUZZ_INPUTS", "150"))
CHECKPOINT_SHARE = 0.05
LIMIT_S = 6.0
"""Seconds of computing after which an input counts as endless."""


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    errors: str


class TooLong(BaseException):
    """An input takes too long."""


class LightRewards:
    """Scores in this process: the real pool has its own tests, and takes a second to start."""

    def __init__(self, function: Callable[[Problem, str], float], *limits: float) -> None:
        self._function = function

    async def score(self, problem: Problem, response: str, *_: Any) -> Reward:
        try:
            return Reward(float(self._function(problem, response)))
        except Exception as error:
            return Reward(0.0, "error", repr(error))

    def close(self) -> None: ...


class LightEngine:
    """Generates nothing, at once: no engine starts."""

    def __init__(self, *_: object) -> None:
        self._waiting: list[SampleRequest] = []

    def __enter__(self) -> "LightEngine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def report(self) -> None: ...

    def call(self, command: object, argument: Any) -> list[Sample]:
        if command is Engine.submit:
            self._waiting += argument
            return []
        done, self._waiting = self._waiting, []
        return [Sample(r.sample_id, (5,), (), "stop", "e", 0, 0.0, 0.0, 0.0) for r in done]


@contextlib.contextmanager
def computing_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` after this much computing; a busy machine does not shorten it."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def tlt(arguments: list[str]) -> Outcome:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            with computing_limit(LIMIT_S):
                run(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return Outcome(code, output.getvalue(), errors.getvalue())


def fault(attempt: Attempt) -> str:
    """Return what is wrong with how the command takes an input; empty if nothing is."""
    try:
        done = tlt(attempt.arguments)
    except TooLong:
        return f"takes more than {LIMIT_S:g} s"
    except BaseException:
        return traceback.format_exc(limit=-6)
    if done.code == 0:
        return "is accepted" if attempt.must_fail else ""
    if done.code != 2:
        return f"ends with exit code {done.code}: {done.errors}"
    if done.errors.lower().startswith("usage"):
        return ""
    if not any(name in done.errors for name in attempt.names):
        return f"names none of {attempt.names}: {done.errors}"
    return "" if "; " in done.errors else f"names no way out: {done.errors}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return sound_world(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # rewards add their folder
    for place in ("train.preflight", "offline.evaluate"):
        monkeypatch.setattr(f"tlt.{place}.RewardPool", LightRewards)
    monkeypatch.setattr("tlt.offline.evaluate.ChildEngine", LightEngine)
    for limit in ("tasks.gym.PROBLEM_S", "user_code.IMPORT_S", "tasks.chat.PROMPT_S"):
        monkeypatch.setattr(f"tlt.{limit}", 2.0)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("_at_home")
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_ends_in_a_traceback(kind: str, world: World, tmp_path: Path) -> None:
    make, share = KINDS[kind]
    found = []
    for number in range(max(1, round(share * NUM_INPUTS))):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        attempt = make(random.Random(f"{kind}/{number}"), world, folder)
        if why := fault(attempt):
            found.append(f"{kind}/{number}: tlt {' '.join(attempt.arguments)[:600]}\n{why}")
    assert not found, f"{len(found)} inputs:\n\n" + "\n\n".join(found)


def last_checkpoint(run: Path) -> tuple[Path | None, int, str]:
    """Return the checkpoint that a run resumes from and its RL step, or why it does not resume."""
    try:
        return *RunFolder(run).last_checkpoint(), ""
    except ConfigError as refusal:
        return None, 0, str(refusal)


def test_no_damage_to_a_checkpoint_ends_in_a_traceback(tmp_path: Path) -> None:
    """A run resumes from a sound checkpoint, or refuses and names the damaged one."""
    for number in range(max(1, round(CHECKPOINT_SHARE * NUM_INPUTS))):
        draw = random.Random(f"checkpoint/{number}")
        folder = RunFolder(tmp_path / f"{number}")
        steps = draw.choice(((20,), (10, 20)))
        for step in steps:
            hidden = folder.begin_checkpoint(step)
            for name in ("weights", "version.json"):
                (hidden / name).write_bytes(draw.randbytes(300))
            folder.publish_checkpoint(hidden, step, keep=9)
        harmed = folder.path / "checkpoints" / "step-000020"
        harm_file(draw, harmed / draw.choice(("state.json", "weights", "version.json")))
        found, step, refusal = last_checkpoint(folder.path)
        if refusal:
            assert re.search(r"step-000020, is damaged .* start a new run\.out", refusal)
        assert bool(refusal) == (found is None)
        assert found is None or step in steps
        assert not refusal or len(steps) == 1


@pytest.mark.usefixtures("_at_home")
def test_the_input_that_is_spoilt_is_sound(world: World, tmp_path: Path) -> None:
    for arguments in world.sound(tmp_path):
        done = tlt(arguments)
        assert done.code == 0, f"tlt {' '.join(arguments)}\n{done.output}{done.errors}"
