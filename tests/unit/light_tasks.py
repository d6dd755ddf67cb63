"""Problems, prompts and rewards without models and processes, for runs under faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from light_ranks import digest

from tlt.tasks.gym import Problem
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
