"""Worked use of tools, for the supervised start of a policy that is to call them.

An environment's `worked(**problem)` returns the turns of a policy that solves the problem. The
environment answers them here as in a run, so the policy learns from dialogues of the same form.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tlt.agents.environment import (
    Reader,
    answer,
    begin,
    class_of,
    environment_class,
    named,
    tool_schemas,
)
from tlt.contracts import Worked
from tlt.errors import ConfigError
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem

MAX_ANSWER_TOKENS = 512
KINDS = (staticmethod, classmethod)


def worked_dialogues(
    environment: str,
    chat: Chat,
    problems: Sequence[Problem],
    read: Reader,
    key: str = "--environment",
) -> list[Worked]:
    """Return a dialogue for each problem, from the environment's own solutions."""
    cls = environment_class(environment, key)
    if not isinstance(inspect.getattr_static(class_of(cls), "worked", None), KINDS):
        raise ConfigError(
            f"{key}: {environment!r} shows no solutions; give it a static method "
            "worked(**problem) that returns the policy's turns, as "
            "examples/calculator_agent/calculator.py does"
        )
    tools = tool_schemas(cls, key)
    made = []
    for problem in problems:
        try:
            made.append(_dialogue(cls, chat, tools, problem, read))
        except ConfigError:
            raise
        except Exception as error:  # a user's code
            raise ConfigError(
                f"{key}: {environment!r} does not work {problem.problem_id} out: "
                f"{type(error).__name__}: {error}"
            ) from error
    return made


def _dialogue(
    cls: Any, chat: Chat, tools: Sequence[dict[str, Any]], problem: Problem, read: Reader
) -> Worked:
    columns = {"question": problem.question, "answer": problem.answer} | problem.entry
    said = begin(cls, columns)
    question = "\n".join([problem.question, *said.messages])
    tokens = list(chat.prompt(question, problem.history, tools))
    parts: list[tuple[int, int]] = []
    worked = class_of(cls).worked
    for text in worked(**named(worked, columns)):
        if said.num_errors or said.done:
            why = said.messages[0] if said.messages else "the environment is done"
            raise ValueError(f"worked continues after a turn that calls no tool, or wrongly: {why}")
        if parts:
            tokens += chat.after_turn(said.messages, tokens[-1], MAX_ANSWER_TOKENS)
        turn = chat.turn(text)
        parts.append((len(tokens), len(tokens) + len(turn)))
        tokens += turn
        said = answer(cls, said.state, text, read)
    return tokens, parts
