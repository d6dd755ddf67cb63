"""Worked use of tools, for the supervised start of a policy that is to call them.

An environment's `worked(**problem)` returns the turns of a policy that solves the problem. The
environment answers them here as in a run, so the policy learns from dialogues of the same form.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tlt.agents.environment import (
    answer,
    begin,
    class_of,
    environment_class,
    tagged_calls,
    tool_schemas,
)
from tlt.contracts import Worked
from tlt.errors import ConfigError
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem

MAX_ANSWER_TOKENS = 512


def worked_dialogues(
    environment: str, chat: Chat, problems: Sequence[Problem], key: str = "--environment"
) -> list[Worked]:
    """Return a dialogue for each problem, from the environment's own solutions."""
    cls = environment_class(environment, key)
    if not inspect.isroutine(getattr(class_of(cls), "worked", None)):
        raise ConfigError(
            f"{key}: {environment!r} shows no solutions; give it a static method "
            "worked(**problem) that returns the policy's turns, as "
            "examples/calculator_agent/calculator.py does"
        )
    tools = tool_schemas(cls, key)
    return [_dialogue(cls, chat, tools, problem) for problem in problems]


def _dialogue(cls: Any, chat: Chat, tools: Sequence[dict[str, Any]], problem: Problem) -> Worked:
    columns = {"question": problem.question, "answer": problem.answer} | problem.entry
    said = begin(cls, columns)
    question = "\n".join([problem.question, *said.messages])
    tokens = list(chat.prompt(question, problem.history, tools))
    parts: list[tuple[int, int]] = []
    for text in class_of(cls).worked(**columns):
        if parts:
            tokens += chat.after_turn(said.messages, tokens[-1], MAX_ANSWER_TOKENS)
        turn = chat.turn(text)
        parts.append((len(tokens), len(tokens) + len(turn)))
        tokens += turn
        said = answer(cls, said.state, text, tagged_calls)
    return tokens, parts
