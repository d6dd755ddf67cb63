"""The published strategy, for comparison: bucketed epsilon-greedy over a sliding window.

Batch sizes fall into buckets; each bucket has its arms, the longer drafts only in the smaller
buckets. Within a bucket the arm with the best median reward of its last few uses is taken, or, with
probability epsilon, any. The reward of a step is its accepted tokens times the batch over its
time: its tokens per second. Nothing is shared between arms or between buckets.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence

from tlt.contracts import OFF, Arm, StepContext, StepReport

LIMITS = (2, 4, 8, 16, 32)
"""Largest batch of each bucket; one more takes the rest."""
VERIFIED_TOKENS = 64
"""An arm belongs to a bucket if its full batch verifies at most so many tokens."""


class BegMab:
    """Learns the best arm of every bucket by trying."""

    def __init__(
        self,
        arms: Collection[Arm],
        rng: random.Random,
        epsilon: float = 0.1,
        window: int = 16,
        hold_steps: int = 4,
        limits: Sequence[int] = LIMITS,
        verified_tokens: int = VERIFIED_TOKENS,
    ) -> None:
        ordered = sorted({*arms, OFF}, key=lambda arm: (arm.drafter, arm.num_draft_tokens))
        self._limits = list(limits)
        self._buckets = [
            [
                OFF,
                *(
                    a
                    for a in ordered
                    if a != OFF and (a.num_draft_tokens + 1) * limit <= verified_tokens
                ),
            ]
            for limit in limits
        ] + [[OFF]]
        self._rng = rng
        self._epsilon = epsilon
        self._window = window
        self._hold_steps = hold_steps
        self._rewards: dict[tuple[int, Arm], deque[float]] = {}
        self._bucket = -1
        self._current = OFF
        self._steps_left = 0

    def arms(self) -> frozenset[Arm]:
        return frozenset(arm for bucket in self._buckets for arm in bucket)

    def observe(self, report: StepReport) -> None:
        steady = report.verified == report.proposed and report.num_prefill_tokens == 0
        reward = report.num_output_tokens / report.elapsed_s if report.elapsed_s > 0 else math.nan
        if steady and report.num_decodes > 0 and math.isfinite(reward):
            key = (bisect_left(self._limits, report.num_decodes), report.proposed)
            self._rewards.setdefault(key, deque(maxlen=self._window)).append(reward)

    def decide(self, context: StepContext) -> Arm:
        num_decodes = context.num_decodes or context.num_prefills
        bucket = bisect_left(self._limits, num_decodes)
        self._steps_left -= 1
        if bucket == self._bucket and self._steps_left > 0:
            return self._current
        self._bucket = bucket
        self._steps_left = self._hold_steps
        arms = self._buckets[bucket]
        if self._rng.random() < self._epsilon:
            self._current = self._rng.choice(arms)
        else:
            self._current = max(arms, key=lambda arm: self._median(bucket, arm))
        return self._current

    def _median(self, bucket: int, arm: Arm) -> float:
        rewards = self._rewards.get((bucket, arm))
        return statistics.median(rewards) if rewards else math.inf  # untried arms first
