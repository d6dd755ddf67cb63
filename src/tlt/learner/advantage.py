"""How good each sample of a group was, relative to the other samples of the group. Pure.

Each function takes the rewards of one group (the samples of one prompt) and returns one advantage
per sample, which all its tokens share. Equal rewards teach nothing: their advantages are exactly
zero, so the learner can leave such a group out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tlt.user_code import chosen_function

Advantage = Callable[[Sequence[float]], list[float]]

STD_FLOOR = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """Return the distances from the group's mean, in standard deviations of the group."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + STD_FLOOR) for r in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Return the plain distances from the group's mean: easy and hard prompts weigh the same."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return the distances from the mean of the other samples, a baseline without the sample."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [r - (total - r) / (len(rewards) - 1) for r in rewards]


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def advantage_function(name: str) -> Advantage:
    """Return the function that `algorithm.advantage` names."""
    return chosen_function("algorithm.advantage", name, ADVANTAGES, "my_algorithm:advantage")
