"""How many tokens of a drafter's drafts are accepted, learned from `StepReport`s.

The estimates forget slowly and say how sure they are. They are pure arithmetic on a few dozen
numbers: an update costs microseconds, and memory does not grow with time.
"""

from __future__ import annotations

import math
from itertools import pairwise

from tlt.contracts import Arm, StepReport


class Acceptance:
    """How often one drafter's tokens are accepted, position by position.

    `Acceptance` learns the chance that a draft position is accepted once all earlier positions are.
    This chance does not depend on the draft length: every length teaches all shorter ones. Where
    text turns hard, the first positions say so for later positions that short drafts do not reach.

    There are two memories. The short memory follows the text, which turns from easy to hard within
    a response; it compares draft lengths of one drafter. The long memory compares drafters: a
    drafter last tried on easy text must not seem better than the drafter that has hard text now.
    Where the short memory has seen too few drafts, it takes the change of chances from one position
    to the next from the long memory.

    The latest few drafts show when a memory is out of date. They replace the short memory as soon
    as they do not fit it. They replace the long memory only after a trial (`believe_latest`).
    """

    LATEST, RECENT, USUAL = 24.0, 120.0, 2000.0
    """Verified requests that the latest drafts, the short and the long memory hold."""
    OTHER_TEXT = 16.0
    """Verified requests that the long memory counts for when other requests have started."""

    def __init__(self, max_draft_tokens: int, prior: float = 0.3) -> None:
        self._latest = _Chances(max_draft_tokens, self.LATEST, prior)
        self._recent = _Chances(max_draft_tokens, self.RECENT, prior)
        self._usual = _Chances(max_draft_tokens, self.USUAL, prior)
        self._verified = [0.0] * max_draft_tokens
        """Verified requests by draft length: entry i counts drafts longer than i tokens."""
        self._offered = 0.0
        self._drafted = 0.0

    def observe(self, report: StepReport) -> bool:
        """Learn from the drafts that an engine step verified.

        Return whether the text has turned: the latest drafts do not fit the short memory.
        """
        length = min(report.verified.num_draft_tokens, len(self._verified))
        num_requests = max(report.num_decodes, report.num_drafts)
        if length == 0 or num_requests <= 0:
            return False
        reached = [num_requests]
        for position in range(length):
            accepted = report.accepted_at[position] if position < len(report.accepted_at) else 0
            reached.append(min(accepted, reached[-1]))
            self._verified[position] += num_requests
        self._latest.observe(reached)
        turned = self._latest.differs_from(self._recent)
        self._recent.observe(reached)
        self._usual.observe(reached)
        if turned:
            self._recent.become(self._latest, self.LATEST)
        keep = math.exp(-num_requests / self.USUAL)
        self._offered = keep * self._offered + num_requests * length
        self._drafted = keep * self._drafted + min(
            report.num_draft_tokens, num_requests * report.verified.num_draft_tokens
        )
        return turned

    @property
    def num_verified(self) -> float:
        """Number of requests whose drafts were verified."""
        return self._verified[0]

    def seen(self, arm: Arm) -> bool:
        """Return whether enough drafts of this length were verified for an estimate."""
        return self._verified[arm.num_draft_tokens - 1] >= 4

    def forget(self, weight: float) -> None:
        """Keep the chances, but trust them like `weight` requests: the drafter has changed."""
        self._latest.forget(0.0)
        self._recent.forget(weight)
        self._usual.forget(weight)

    @property
    def ease(self) -> float:
        """Ratio of the first draft token's recent chance to its usual chance."""
        return self._recent.first / self._usual.first

    def begin(self) -> None:
        """Start a new use of the drafter: only drafts from now on count as its latest."""
        self._latest.forget(0.0)

    def believe_latest(self, ease: float) -> bool:
        """Let the latest drafts replace both memories if they do not fit the long memory.

        `ease` is the ease of the drafter in use: text that is as easy or as hard for both drafters
        is not a change. Return whether the memories were replaced.
        """
        changed = self._latest.differs_from(self._usual, ease)
        if changed:
            self._recent.become(self._latest, self.LATEST)
            self._usual.become(self._latest, self.LATEST)
        return changed

    def expect_other_text(self) -> None:
        """Expect usual text until drafts say otherwise: other requests are running."""
        self._recent.become(self._usual, self.OTHER_TEXT)

    def drafted(self, num_draft_tokens: int) -> float:
        """Return the tokens that a request drafts per step.

        A model drafts all that it is asked for, and a lookup without a match none.
        """
        share = self._drafted / self._offered if self._offered > 0 else 1.0
        return share * num_draft_tokens

    def recent_tokens(self, num_draft_tokens: int, in_use: int = 0) -> tuple[float, float]:
        """Return the tokens that a request gains per step in recent text: expected and optimistic.

        Drafts of the length in use share their first positions with this length, so that there is
        no optimism about these positions.
        """
        shape = self._usual.chances(num_draft_tokens)
        return self._recent.tokens(num_draft_tokens, in_use, shape)

    def usual_tokens(self, num_draft_tokens: int) -> tuple[float, float]:
        """Return the tokens that a request gains per step in all text: expected and optimistic."""
        return self._usual.tokens(num_draft_tokens, 0)


class _Chances:
    """One memory: for each draft position, the chance to be accepted once all earlier ones are."""

    PRIOR_WEIGHT = 6.0
    MIN_DRAFTS, DEVIATIONS = 6.0, 3.0
    """Drafts needed to compare two memories, and standard errors that count as a difference."""

    def __init__(self, num_positions: int, window: float, prior: float) -> None:
        self._window = window
        self._prior = prior
        self._reached = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def observe(self, reached: list[int]) -> None:
        """Count a step's drafts: `reached[i]` of them were accepted up to position i."""
        keep = math.exp(-reached[0] / self._window)
        for position, (before, accepted) in enumerate(pairwise(reached)):
            self._reached[position] = keep * self._reached[position] + before
            self._accepted[position] = keep * self._accepted[position] + accepted

    def forget(self, weight: float) -> None:
        """Keep the chances, but with the weight of at most `weight` drafts."""
        keep = min(1.0, weight / max(self._reached[0], 1.0))
        self._reached = [keep * reached for reached in self._reached]
        self._accepted = [keep * accepted for accepted in self._accepted]

    def become(self, other: _Chances, weight: float) -> None:
        """Copy another memory, with the weight of at most `weight` drafts."""
        self._reached, self._accepted = list(other._reached), list(other._accepted)
        self.forget(weight)

    @property
    def first(self) -> float:
        """Chance of the first position."""
        weight = self._reached[0] + self.PRIOR_WEIGHT
        return (self._accepted[0] + self.PRIOR_WEIGHT * self._prior) / weight

    def differs_from(self, other: _Chances, ease: float = 1.0) -> bool:
        """Return whether the first position differs from `ease` times the other memory's.

        Differences that chance explains do not count.
        """
        num, num_other = self._reached[0], other._reached[0]
        if num < self.MIN_DRAFTS or num_other < self.MIN_DRAFTS:
            return False
        expected = min(0.95, max(0.05, ease * other._accepted[0] / num_other))
        variance = expected * (1 - expected) * (1 / num + 1 / num_other)
        return abs(self._accepted[0] / num - expected) > self.DEVIATIONS * math.sqrt(variance)

    def chances(self, num_draft_tokens: int, shape: list[float] | None = None) -> list[float]:
        """Return the chance of each position.

        An unknown position has the chance of the position before it. With `shape`, the chances of a
        longer memory, the odds change from position to position as they do there.
        """
        chances: list[float] = []
        chance = shape[0] if shape else self._prior
        for position in range(min(num_draft_tokens, len(self._reached))):
            if shape and position:
                odds = _odds(shape[position]) / _odds(shape[position - 1]) * _odds(chance)
                chance = odds / (1 + odds)
            weight = self._reached[position] + self.PRIOR_WEIGHT
            chance = (self._accepted[position] + self.PRIOR_WEIGHT * chance) / weight
            chances.append(chance)
        return chances

    def tokens(
        self, num_draft_tokens: int, num_given: int, shape: list[float] | None = None
    ) -> tuple[float, float]:
        """Return expected tokens, and optimistic ones for positions from `num_given` on."""
        expected = optimistic = rate = upper = 1.0
        variance = 0.0
        for position, chance in enumerate(self.chances(num_draft_tokens, shape)):
            rate *= chance
            if position >= num_given:
                weight = self._reached[position] + self.PRIOR_WEIGHT
                variance += max(chance * (1 - chance), 0.05) / weight / max(chance, 0.05) ** 2
            upper = min(upper, rate * (1 + 1.5 * math.sqrt(variance)))
            expected += rate
            optimistic += upper
        return expected, optimistic


def _odds(chance: float) -> float:
    chance = min(max(chance, 0.01), 0.99)
    return chance / (1 - chance)
