"""The held-out sets of a run, and the estimate of pass@k.

A set is problems that no RL step gets, the reward that scores them, and how they are sampled. A run
has a set of its own task (`eval.num_problems`) and the sets of `eval.sets`. A sample is right if
its reward is `RIGHT` or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

from tlt.config.tasks import EvalSetConfig
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardFunction, reward_function
from tlt.tasks.source import Source, fixed_problems

RIGHT = 1.0
"""Smallest reward of a right sample."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out set."""

    name: str
    """Empty for the set of the run's own task."""
    setting: str
    """The setting of its reward, for messages."""
    problems: Sequence[Problem]
    reward: RewardFunction
    num_samples: int
    """Samples of each problem."""
    temperature: float


def held_out_sets(config: TrainConfig, source: Source, reward: RewardFunction) -> list[HeldOut]:
    """Return the sets that a run evaluates, its own first; none if it never evaluates."""
    settings, sets = config.eval, []
    if not settings.every_steps:
        return []
    if settings.num_problems:
        problems = source.held_out(settings.num_problems)
        samples, temperature = settings.samples_per_problem, settings.temperature
        sets.append(HeldOut("", "reward.function", problems, reward, samples, temperature))
    sets += [open_set(config, each) for each in settings.sets]
    if not sets:
        raise ConfigError(
            "eval.num_problems = 0 without eval.sets leaves nothing to evaluate; e.g. "
            "eval.num_problems = 64, or eval.every_steps = 0 to never evaluate"
        )
    for number, each in enumerate(sets):
        if each.name in (before.name for before in sets[:number]):
            raise ConfigError(
                f"eval.sets: two sets are called {each.name!r}; e.g. {each.name}_2 for the second"
            )
        if each.temperature == 0 and each.num_samples > 1:
            where = f"eval.sets, {each.name}" if each.name else "eval"
            raise ConfigError(
                f"{where}: temperature = 0 makes {each.num_samples} equal samples of every "
                "problem; e.g. temperature = 0.6, or samples_per_problem = 1"
            )
    return sets


def open_set(config: TrainConfig, chosen: EvalSetConfig) -> HeldOut:
    """Return one of `eval.sets`; errors begin with its name."""
    where, task = f"eval.sets, {chosen.name}", chosen.task
    trained_on = config.task.path and task.path
    if trained_on and Path(config.task.path or "").resolve() == Path(task.path or "").resolve():
        raise ConfigError(
            f"{where}: task.path = {task.path!r} is the file that the run trains on; give another "
            "file, or hold out rows of this one with eval.num_problems"
        )
    try:
        problems = fixed_problems(task, config.run.seed, chosen.num_problems)
        reward = reward_function(chosen.reward, task.path is not None)
    except ConfigError as error:
        text = str(error).replace("reward.function", "reward")
        raise ConfigError(f"{where}: {text}") from error
    own = config.eval
    temperature = own.temperature if chosen.temperature is None else chosen.temperature
    samples = chosen.samples_per_problem or own.samples_per_problem
    setting = f"{where}: reward = {chosen.reward!r}"
    return HeldOut(chosen.name, setting, problems, reward, samples, temperature)


# --- pass@k ---------------------------------------------------------------------------------------


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that one of k samples, drawn from these without repeats, passes."""
    assert 1 <= k <= num_samples
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def ks(num_samples: int) -> list[int]:
    """Return the k to report: powers of two, and all samples."""
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return sorted({*powers, num_samples})


def pass_shares(num_samples: int, num_passed: Sequence[int]) -> dict[int, list[float]]:
    """Return pass@k of every problem, by k, from how many of its samples passed."""
    return {k: [pass_at(num_samples, n, k) for n in num_passed] for k in ks(num_samples)}
