"""Problems, prompts, tools and rewards without models and processes, for runs under faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from light_ranks import digest

from tlt.agents import environment as user
from tlt.contracts import SampleRequest
from tlt.tasks.gym import Problem
from tlt.tasks.processes import Fault
from tlt.tasks.rewards import Reward


class Chat:
    def prompt(self, question: str, history: object = ()) -> tuple[int, ...]:
        return tuple(question.encode())

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Source:
    def batch(self, step: int, count: int) -> list[Problem]:
        return [Problem(f"{step}/{n}", f"what is {step} + {n}?", "") for n in range(count)]

    def extra(self, step: int, count: int, num_extra: int) -> list[Problem]:
        return self.batch(step, count + num_extra)[count:]


class Rewards:
    async def score(self, problem: Problem, text: str, *_: object) -> Reward:
        await asyncio.sleep(0.01)
        value = digest(problem.problem_id, text)
        return Reward(0.0, "timeout") if value % 23 == 0 else Reward(float(value % 2))


# --- environments ---------------------------------------------------------------------------------

END = 0
"""The token that ends a turn. All others are bytes of its text."""


class ToolChat:
    """Bytes for tokens: a turn ends with `END`, and an answer stands between brackets."""

    def prompt(self, question: str, history: object = (), tools: object = ()) -> tuple[int, ...]:
        return tuple(question.encode())

    def after_turn(self, said: Sequence[str], last_token: int, limit: int) -> tuple[int, ...]:
        return tuple("".join(f"[{text[:limit]}]" for text in said).encode())

    def turn_text(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids[:-1]).decode()

    def text(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode()

    @staticmethod
    def turn(text: str) -> tuple[int, ...]:
        return (*text.encode(), END)


class Counter:
    """A number as the question: so many calls, and then the number."""

    def reset(self, question: str) -> None:
        self.left, self.paid = int(question), 0.0

    def take(self) -> str:
        """Take one."""
        self.left, self.paid = self.left - 1, self.paid + 1
        return f"{self.left}"

    @staticmethod
    def turn(request: SampleRequest) -> tuple[int, ...]:
        """Return what a policy says that knows what to do."""
        text = ToolChat().text(request.prompt_token_ids)
        number, *answers = text.replace("]", "").split("[")
        left = int(answers[-1]) if answers else int(number[0])
        return ToolChat.turn('<tool_call>{"name": "take"}</tool_call>' if left else number[0])


class Paid(Counter):
    """One for each call."""

    def reward(self) -> float:
        return self.paid


class LightHost:
    """Calls environments in this process, without a journal."""

    def __init__(self, folder: Path) -> None:
        self.refused: set[str] = set()
        self.broken = False

    async def begin(self, name: str, label: str, number: int, problem: Problem) -> user.Answer:
        await asyncio.sleep(0)
        if problem.problem_id in self.refused:
            raise Fault("error", "no")
        cls = user.environment_class(name)
        return user.begin(cls, {"question": problem.question, **problem.entry})

    async def answer(
        self, name: str, label: str, sample_id: str, turn: int, state: bytes, text: str
    ) -> user.Answer:
        await asyncio.sleep(0)
        if self.broken:
            raise ZeroDivisionError
        cls: Any = user.environment_class(name)
        return replace(user.answer(cls, state, text, user.tagged_calls), seconds=0.25)
