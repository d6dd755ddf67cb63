"""BEG-MAB, the bandit of the TLT paper (arXiv 2511.16665), in its released shape, for comparison.

BEG-MAB is bucketed epsilon-greedy over a sliding window. Batch sizes fall into buckets, and draft
lengths into as many groups: the longest drafts for the smallest batches. Above `MAX_BATCH` running
requests nothing drafts. Within its bucket's group the strategy takes the arm with the best median
reward at this very batch size or, with probability epsilon, a random arm. The reward of an engine
step is its tokens per second, with the arm's median tokens per request over all batch sizes in
place of the step's own.

The figures come from the release (github.com/mit-han-lab/fastrl, commit bce3df7) as its trainer
runs it. The window is its server's default: the trainer sets none, so the bandit's own default of
1,000 has no effect.

Three things differ from the release. A chosen arm stays for two engine steps, because vLLM verifies
drafts one engine step later. Any number of draft lengths, of chains, is dealt out evenly to the
buckets; the release wants as many lengths as buckets. And a switch is free here: the release
prefills again to begin speculation, so it first waits for ten engine steps with small batches.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection

from tlt.contracts import OFF, Arm, StepContext, StepReport

BUCKETS = (1, 2, 5, 21)
"""Smallest batch of each bucket."""
MAX_BATCH = 32
"""Largest batch with drafts."""
EPSILON = 0.1
"""Probability of a random arm."""
WINDOW = 300
"""Latest rewards of an arm and batch size that count."""
HOLD_STEPS = 2
"""Engine steps for which an arm is kept."""


class BegMab:
    """Learns the best arm of each bucket by trials."""

    def __init__(self, arms: Collection[Arm], rng: random.Random, epsilon: float = EPSILON) -> None:
        drafting = sorted({*arms} - {OFF}, key=str)
        lengths = sorted({arm.num_draft_tokens for arm in drafting}, reverse=True)
        self._groups: list[list[Arm]] = []
        """The arms of each bucket."""
        for place in range(len(BUCKETS)):
            first = place * len(lengths) // len(BUCKETS)
            last = (place + 1) * len(lengths) // len(BUCKETS)
            group = lengths[first : max(last, first + 1)]
            self._groups.append([arm for arm in drafting if arm.num_draft_tokens in group] or [OFF])
        self._rng = rng
        self._epsilon = epsilon
        self._rewards: dict[tuple[int, Arm], deque[float]] = defaultdict(_window)
        self._gained: dict[Arm, deque[float]] = defaultdict(_window)
        """Tokens per request of each arm's latest engine steps."""
        self._current = OFF
        self._steps_left = 0

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        """Return every arm that may be chosen."""
        if num_decodes is None:
            return frozenset((OFF, *(arm for group in self._groups for arm in group)))
        return frozenset(self._allowed(num_decodes))

    def _allowed(self, num_decodes: int) -> list[Arm]:
        if num_decodes > MAX_BATCH:
            return [OFF]
        return self._groups[max(0, bisect_right(BUCKETS, num_decodes) - 1)]

    def observe(self, report: StepReport) -> None:
        """Learn the reward of a step that verified and drafted with the same arm."""
        num_decodes, arm = report.num_decodes, report.proposed
        steady = report.verified == arm and report.num_prefill_tokens == 0
        rate = num_decodes / report.elapsed_s if report.elapsed_s > 0 else math.nan
        if steady and num_decodes > 0 and math.isfinite(rate):
            self._gained[arm].append(report.num_output_tokens / num_decodes)
            self._rewards[num_decodes, arm].append(rate * statistics.median(self._gained[arm]))

    def decide(self, context: StepContext) -> Arm:
        """Return the arm that drafts in the next engine step."""
        num_decodes = context.num_decodes or context.num_prefills
        arms = self._allowed(num_decodes)
        self._steps_left -= 1
        if self._steps_left > 0 and self._current in arms:
            return self._current
        self._steps_left = HOLD_STEPS
        if self._rng.random() < self._epsilon:
            self._current = self._rng.choice(arms)
        else:
            self._current = max(arms, key=lambda arm: self._median(num_decodes, arm))
        return self._current

    def _median(self, num_decodes: int, arm: Arm) -> float:
        rewards = self._rewards.get((num_decodes, arm))
        return statistics.median(rewards) if rewards else math.inf  # arms without a reward go first


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)
