"""Tool processes: they call environments, each call within a time limit, and keep the journal.

A tool that hangs or dies costs its trajectory an answer: the policy reads an error instead. A call
whose driver was killed still ends, and leaves its answer in the journal.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tlt.agents import environment as user
from tlt.agents import journal
from tlt.agents.environment import Answer, Reader
from tlt.config.tasks import ToolsConfig
from tlt.errors import ConfigError
from tlt.tasks.processes import Fault, Processes

HERMES = "hermes"
"""The parser that needs no library: JSON between <tool_call> tags."""


class ToolHost:
    """Calls environments for one event loop."""

    def __init__(
        self, config: ToolsConfig, model: str, folder: Path, environment: str = ""
    ) -> None:
        """`environment` is imported before any time limit runs."""
        self._config = config
        self._model = model
        self._folder = folder.resolve()  # tools may change to another folder
        ready = [config.parser, model, environment]
        self._processes = Processes(
            *("tools", config.num_workers, config.timeout_s, _prepare, ready),
            max_deaths=1,
            outlive=True,
        )

    async def begin(self, environment: str, label: str, number: int, problem: Any) -> Answer:
        """Reset an environment for a problem; `Fault` if that fails."""
        path = journal.entry(self._folder / label, f"problem-{number}", 0, problem.question)
        columns = {"question": problem.question, "answer": problem.answer} | problem.entry
        try:
            payload = pickle.dumps((environment, columns))
        except Exception as error:  # a column may hold any object
            raise Fault("error", f"its problem cannot be sent to a process: {error}") from error
        call = _begin, str(path), payload
        try:
            found, why = await self._processes.call(*call)
        except Fault as fault:
            if fault.kind != "crash":
                raise
            found, why = await self._processes.call(*call)  # it may have been killed from outside
        if found is None:
            raise Fault("error", why)
        answer: Answer = found
        return answer

    async def answer(
        self, environment: str, label: str, sample_id: str, turn: int, state: bytes, text: str
    ) -> Answer:
        """Return an environment's answer to a turn's text; an error if it does not answer."""
        path = journal.entry(self._folder / label, sample_id, turn, text)
        started_s = time.monotonic()
        try:
            call = _answer, str(path), environment, state, text, self._config.parser, self._model
            answer: Answer = await self._processes.call(*call)
        except Fault as fault:
            said = journal.lost(state, f"error: the tool {fault}")
            seconds = time.monotonic() - started_s
            answer = journal.settle(path, replace(said, seconds=seconds))
        return answer

    def forget(self, step: int) -> None:
        """Drop the answers of RL steps that no run does again."""
        journal.forget(self._folder, step)

    def close(self) -> None:
        """End the processes, once their calls have ended."""
        self._processes.close(wait_s=self._config.timeout_s)


# --- in a tool process ----------------------------------------------------------------------------


_home = ""
"""The folder in which every call begins, in a tool process."""


class _Untaken(Exception):
    """What a user's `reset` raised."""


def _prepare(parser: str, model: str, environment: str) -> None:
    global _home
    _home = str(Path.cwd())
    with contextlib.suppress(Exception):  # the first call will report it
        reader(parser, model)
        user.environment_class(environment)


@contextlib.contextmanager
def _sound() -> Iterator[None]:
    """Begin a call, and end this process if it cannot keep the journal.

    Earlier calls may have changed the folder, or have used up what the process may open.
    """
    try:
        if _home:
            os.chdir(_home)
        yield
    except Exception:
        if not _home:
            raise
        os._exit(1)


def _begin(path: str, payload: bytes) -> tuple[Answer | None, str]:
    started_s = time.monotonic()

    def work() -> Answer:
        try:
            name, columns = pickle.loads(payload)
            answer = user.begin(user.environment_class(name), columns)
        except BaseException as error:  # also SystemExit, which would end the process
            raise _Untaken(f"{type(error).__name__}: {error}"[: user.MAX_ERROR]) from error
        return replace(answer, seconds=time.monotonic() - started_s)

    with _sound():
        try:
            return journal.kept(Path(path), work), ""
        except _Untaken as error:
            return None, str(error)


def _answer(path: str, name: str, state: bytes, text: str, parser: str, model: str) -> Answer:
    started_s = time.monotonic()

    def work() -> Answer:
        try:
            cls, read = user.environment_class(name), reader(parser, model)
            answer = user.answer(cls, state, text, read)
        except BaseException as error:  # from its reward, or from its pickling
            said = f"error: {type(error).__name__}: {error}"[: user.MAX_ERROR]
            answer = journal.lost(state, said)
        return replace(answer, seconds=time.monotonic() - started_s)

    with _sound():
        return journal.answered_once(Path(path), state, work)


@cache
def reader(parser: str, model: str) -> Reader:
    """Return what reads the tool calls of a model's texts."""
    if parser == HERMES:
        return user.tagged_calls
    try:
        from tlt.vllm.tool_calls import vllm_reader
    except ImportError as error:
        raise ConfigError(
            f"tools.parser = {parser!r} needs vLLM, which is not installed; e.g. {HERMES!r}"
        ) from error
    return vllm_reader(parser, model)
