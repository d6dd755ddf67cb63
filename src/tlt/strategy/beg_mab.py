"""BEG-MAB, the bandit of the TLT paper (arXiv 2511.16665), for comparison.

BEG-MAB is bucketed epsilon-greedy over a sliding window. Batch sizes fall into buckets, and each
bucket has its own arms: longer drafts only in buckets of small batches. Within a bucket the
strategy takes the arm with the best median reward over its last few uses or, with probability
epsilon, a random arm. The reward of an engine step is its tokens per second. Arms and buckets
share no knowledge.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Collection

from tlt.contracts import OFF, Arm, StepContext, StepReport

LIMITS = (2, 4, 8, 16, 32)
"""Largest batch of each bucket. One more bucket takes larger batches and has no drafts."""
VERIFIED_TOKENS = 64
"""Most tokens that the largest batch of a bucket may verify with one of the bucket's arms."""
EPSILON = 0.1
"""Probability of a random arm."""
WINDOW = 16
"""Latest rewards of an arm that count."""
HOLD_STEPS = 4
"""Engine steps for which an arm is kept."""


class BegMab:
    """Learns the best arm of every bucket by trials."""

    def __init__(
        self,
        arms: Collection[Arm],
        rng: random.Random,
        epsilon: float = EPSILON,
        verified_tokens: int = VERIFIED_TOKENS,
    ) -> None:
        drafting = sorted({*arms} - {OFF}, key=lambda arm: (arm.drafter, arm.num_draft_tokens))
        self._buckets = [
            [OFF, *(a for a in drafting if (a.num_draft_tokens + 1) * limit <= verified_tokens)]
            for limit in LIMITS
        ] + [[OFF]]
        self._rng = rng
        self._epsilon = epsilon
        self._rewards: dict[tuple[int, Arm], deque[float]] = {}
        self._bucket = -1
        self._current = OFF
        self._steps_left = 0

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        """Return every arm that may be chosen."""
        if num_decodes is not None:
            return frozenset(self._buckets[bisect_left(LIMITS, num_decodes)])
        return frozenset(arm for bucket in self._buckets for arm in bucket)

    def observe(self, report: StepReport) -> None:
        """Learn the reward of a step that verified and drafted with the same arm."""
        steady = report.verified == report.proposed and report.num_prefill_tokens == 0
        reward = report.num_output_tokens / report.elapsed_s if report.elapsed_s > 0 else math.nan
        if steady and report.num_decodes > 0 and math.isfinite(reward):
            key = (bisect_left(LIMITS, report.num_decodes), report.proposed)
            self._rewards.setdefault(key, deque(maxlen=WINDOW)).append(reward)

    def decide(self, context: StepContext) -> Arm:
        """Return the arm that drafts in the next engine step."""
        num_decodes = context.num_decodes or context.num_prefills
        bucket = bisect_left(LIMITS, num_decodes)
        self._steps_left -= 1
        if bucket == self._bucket and self._steps_left > 0:
            return self._current
        self._bucket = bucket
        self._steps_left = HOLD_STEPS
        arms = self._buckets[bucket]
        if self._rng.random() < self._epsilon:
            self._current = self._rng.choice(arms)
        else:
            self._current = max(arms, key=lambda arm: self._median(bucket, arm))
        return self._current

    def _median(self, bucket: int, arm: Arm) -> float:
        rewards = self._rewards.get((bucket, arm))
        return statistics.median(rewards) if rewards else math.inf  # arms without a reward go first
