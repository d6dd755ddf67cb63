"""Sources of a run's problems.

A source has random access: the number of an RL step and the seed determine the problems of that
step. A resumed run has no position to restore.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from tlt.config.tasks import TaskConfig
from tlt.errors import ConfigError
from tlt.tasks import gym
from tlt.tasks.file import read_problems
from tlt.tasks.gym import Problem
from tlt.tasks.tail import HeavyTail

NUM_PROBLEMS = 64
"""Problems of a task for an evaluation that names no number."""


class Source(Protocol):
    def batch(self, step: int, count: int) -> list[Problem]:
        """Return the problems of an RL step, with unique ids. `count` must not change."""
        ...

    def extra(self, step: int, count: int, num_extra: int) -> list[Problem]:
        """Return further problems of an RL step, in the order of their use: none of its batch."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Return problems that no RL step gets."""
        ...


class GymSource:
    """A reasoning-gym task, with new problems in every RL step."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        assert config.name is not None
        self._config, self._name, self._seed = config, config.name, seed
        self._sizes = _sizes(config)
        self._made(1, "check")  # refuses bad settings before a run starts

    def batch(self, step: int, count: int) -> list[Problem]:
        return self._made(count, f"step-{step}")

    def extra(self, step: int, count: int, num_extra: int) -> list[Problem]:
        return self._made(num_extra, f"extra-{step}") if num_extra else []

    def held_out(self, count: int) -> list[Problem]:
        return self._made(count, "eval")

    def _made(self, count: int, purpose: str) -> list[Problem]:
        task, parameters = self._name, self._config.parameters
        made = gym.generate(task, count, self._seed, purpose, parameters, self._sizes, spread=True)
        return as_asked(made, self._config)


class FileSource:
    """The rows of a file, in a new order every epoch. The last rows of the file are held out.

    A batch may span two epochs. To have no row twice in such a batch, an epoch starts with rows
    that are not in the batch yet. The order of an epoch thus depends on the order of the epoch
    before, and is computed from the first epoch on.

    Extra problems are drawn from the rows that are not in the batch. They do not change the order
    of the epochs.
    """

    def __init__(self, config: TaskConfig, seed: int, num_held_out: int) -> None:
        rows = as_asked(read_problems(config), config)
        num_train = len(rows) - num_held_out
        if num_train < 1:
            raise ConfigError(
                f"eval.num_problems: {config.path} has {len(rows)} problems, holding out "
                f"{num_held_out} leaves none to train on; e.g. {len(rows) // 10}"
            )
        self._path, self._seed = config.path, seed
        self._train, self._held_out = rows[:num_train], rows[num_train:]
        self._count, self._epoch, self._order = 0, -1, list[int]()

    def batch(self, step: int, count: int) -> list[Problem]:
        return [self._train[row] for row in self._rows(step, count)]

    def extra(self, step: int, count: int, num_extra: int) -> list[Problem]:
        if not num_extra:
            return []
        taken = set(self._rows(step, count))
        left = [row for row in range(len(self._train)) if row not in taken]
        if num_extra > len(left):
            raise ConfigError(
                f"sampling.max_extra_prompts: {num_extra} is more than the {len(left)} problems "
                f"of {self._path} beside the {count} of sampling.prompts_per_step; at most "
                f"{len(left)}"
            )
        rows = random.Random(f"{self._seed}/extra/{step}").sample(left, num_extra)
        return [self._train[row] for row in rows]

    def _rows(self, step: int, count: int) -> list[int]:
        num_train = len(self._train)
        if count > num_train:
            raise ConfigError(
                f"sampling.prompts_per_step: {count} is more than the {num_train} problems of "
                f"{self._path} that are trained on; at most {num_train}"
            )
        start = step * count
        epoch, offset = divmod(start, num_train)
        rows = self._order_of(epoch, count)[offset : offset + count]
        if len(rows) < count:
            rows = rows + self._order_of(epoch + 1, count)[: count - len(rows)]
        return rows

    def held_out(self, count: int) -> list[Problem]:
        if count > len(self._held_out):
            raise ConfigError(
                f"eval.num_problems: {count} problems are asked for, but {len(self._held_out)} "
                f"of {self._path} are held out; at most {len(self._held_out)}"
            )
        return self._held_out[:count]

    def _order_of(self, epoch: int, count: int) -> list[int]:
        """Return the order of an epoch. The last one is cached: most calls need it or the next."""
        if count != self._count or epoch < self._epoch:
            self._count, self._epoch, self._order = count, -1, []
        while self._epoch < epoch:
            self._epoch += 1
            self._order = self._following(self._order, self._epoch)
        return self._order

    def _following(self, before: list[int], epoch: int) -> list[int]:
        """Return the order of `epoch`, given the order of the epoch before."""
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        num_before = epoch * len(order) % self._count
        if num_before == 0:
            return order
        taken = set(before[-num_before:])
        head = [row for row in order if row not in taken][: self._count - num_before]
        started = set(head)
        return head + [row for row in order if row not in started]


def open_source(config: TaskConfig, seed: int, num_held_out: int) -> Source:
    """Return the source that a run's settings name."""
    _check_one(config)
    if config.name is not None:
        return GymSource(config, seed)
    return FileSource(config, seed, num_held_out)


def _check_one(config: TaskConfig) -> None:
    """Refuse settings that name no problems, two kinds, or what their kind does not have."""
    if (config.name is None) == (config.path is None):
        what = "neither is" if config.name is None else "both are"
        raise ConfigError(
            f"task.name or task.path must be set, {what}; e.g. task.name = 'chain_sum'"
        )
    for key in ("sizes", "parameters"):
        if config.path is not None and getattr(config, key):
            raise ConfigError(
                f"task.{key} is for tasks of reasoning-gym, not for files; leave it out, or set "
                "task.name instead of task.path"
            )


def fixed_problems(config: TaskConfig, seed: int, count: int | None) -> list[Problem]:
    """Return the first rows of a file, or problems of a task that no RL step gets.

    Without a count, these are all rows, or `NUM_PROBLEMS`.
    """
    _check_one(config)
    if config.name is not None:
        return GymSource(config, seed).held_out(count or NUM_PROBLEMS)
    return as_asked(read_problems(config)[:count], config)


def _sizes(config: TaskConfig) -> HeavyTail | None:
    try:
        return None if config.sizes is None else HeavyTail(**config.sizes.model_dump())
    except ConfigError as error:
        raise ConfigError(f"task.sizes: {error}") from error


def as_asked(problems: Iterable[Problem], config: TaskConfig) -> list[Problem]:
    """Return the problems with the task's instruction and system prompt."""
    instruction = f"\n{config.instruction}" if config.instruction else ""
    system = {"role": "system", "content": config.system_prompt}
    found = []
    for each in problems:
        has_own = any(message["role"] == "system" for message in each.history)
        history = (system, *each.history) if config.system_prompt and not has_own else each.history
        found.append(replace(each, question=each.question + instruction, history=history))
    return found
