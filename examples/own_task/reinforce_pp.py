"""REINFORCE++ (arXiv 2501.03262): an advantage is relative to the RL step, not to the group."""

from collections.abc import Sequence
from statistics import fmean, pstdev

Groups = Sequence[Sequence[float]]
"""One number per sample, by group."""


def advantage(groups: Groups) -> list[list[float]]:
    """Return how far each reward is from the mean of the RL step, in its standard deviations."""
    rewards = [reward for group in groups for reward in group]
    mean, deviation = fmean(rewards), pstdev(rewards) + 1e-6
    return [[(reward - mean) / deviation for reward in group] for group in groups]


def baseline(groups: Groups) -> list[list[float]]:
    """Return the same for REINFORCE++-baseline, which first compares samples of the same prompt."""
    return advantage([[reward - fmean(group) for reward in group] for group in groups])
