"""Rewards that read the environment when a trajectory has ended, as TRL's may.

Either the environment has a method `get_reward`, or `reward.function` names a function with an
argument `environments`. Both run where all rewards run, once for each trajectory.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from tlt.agents.environment import class_of, environment_class, returned
from tlt.config.train import TrainConfig
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardFunction
from tlt.user_code import chosen_function

StateReward = Callable[[bytes], RewardFunction]
"""Takes an environment's state and returns the reward function of this trajectory."""


def state_reward(config: TrainConfig) -> StateReward | None:
    """Return the reward that reads the environment; None if the run has no such reward."""
    name = config.task.environment
    if name is None:
        return None
    if config.reward.function == "auto":
        owns = inspect.isroutine(getattr(class_of(environment_class(name)), "get_reward", None))
        return partial(partial, own_reward) if owns else None
    if ":" not in config.reward.function:
        return None
    function: Any = chosen_function("reward.function", config.reward.function, {}, "")
    takes = "environments" in inspect.signature(function).parameters
    return partial(partial, trl_reward, function) if takes else None


def own_reward(state: bytes, problem: Problem, text: str) -> Any:
    """Return what the environment's `get_reward` returns."""
    return returned(pickle.loads(state).get_reward())


def trl_reward(function: Callable[..., Any], state: bytes, problem: Problem, text: str) -> Any:
    """Return what a reward function of TRL returns for this sample alone."""
    user = {"role": "user", "content": problem.question}
    columns = {"question": problem.question, "answer": problem.answer} | problem.entry
    given: dict[str, list[Any]] = {name: [value] for name, value in columns.items()}
    given["prompts"] = [[*problem.history, user]]
    given["completions"] = [[{"role": "assistant", "content": text}]]
    given["environments"] = [pickle.loads(state)]
    taken = inspect.signature(function).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        given = {name: value for name, value in given.items() if name in taken}
    (value,) = returned(function(**given))
    return value
