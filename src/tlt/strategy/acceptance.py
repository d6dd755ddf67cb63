"""How many tokens of a drafter's drafts are accepted, learned from `StepReport`s.

The estimates forget slowly and say how sure they are. They are pure arithmetic on a few dozen
numbers: an update costs microseconds, and memory does not grow with time.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

from tlt.contracts import Arm, StepReport

Gained = list[float]
"""Tokens that a request gains per step with drafts of 0, 1, ... tokens."""


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
        self._chances: tuple[list[float], list[float]] | None = None
        """Chances in recent and in all text, until a memory changes; the same for `_expected`."""
        self._expected: tuple[Gained, Gained] = ([], [])
        self._optimistic: dict[tuple[bool, int], Gained] = {}
        """Optimistic tokens in all text (True) or recent text, by the length in use."""

    def observe(self, report: StepReport) -> bool:
        """Learn from the drafts that an engine step verified.

        Return whether the text has turned: the latest drafts do not fit the short memory.
        """
        length = min(report.verified.num_draft_tokens, len(self._verified))
        num_requests = max(report.num_decodes, report.num_drafts)
        if length == 0 or num_requests <= 0:
            return False
        accepted = [num_requests, *report.accepted_at[:length]]
        accepted += [0] * (length + 1 - len(accepted))
        ends = list(accumulate(accepted, min))
        reached, accepted = ends[:-1], ends[1:]
        self._verified[:length] = [num + num_requests for num in self._verified[:length]]
        self._latest.observe(reached, accepted)
        turned = self._latest.differs_from(self._recent)
        self._recent.observe(reached, accepted)
        self._usual.observe(reached, accepted)
        if turned:
            self._recent.become(self._latest, self.LATEST)
        self._changed()
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
        self._changed()

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
            self._changed()
        return changed

    def expect_other_text(self) -> None:
        """Expect usual text until drafts say otherwise: other requests are running."""
        self._recent.become(self._usual, self.OTHER_TEXT)
        self._changed()

    @property
    def drafted_share(self) -> float:
        """Share of the asked tokens that are drafted.

        A model drafts as many tokens as asked for, a lookup without a match none.
        """
        return self._drafted / self._offered if self._offered > 0 else 1.0

    def expected_tokens(self, usual: bool = False) -> Gained:
        """Return the tokens that a request gains per step in recent text, or in all text."""
        if self._chances is None:
            self._estimate()
        return self._expected[usual]

    def optimistic_tokens(self, usual: bool = False, in_use: int = 0) -> Gained:
        """Return the same, with optimism.

        Drafts of the length in use share their first positions with longer and shorter drafts:
        these positions get no optimism.
        """
        chances = self._chances or self._estimate()
        gained = self._optimistic.get((usual, in_use))
        if gained is None:
            memory, given = self._usual if usual else self._recent, self._expected[usual]
            gained = memory.optimistic(chances[usual], given[: in_use + 1])
            self._optimistic[usual, in_use] = gained
        return gained

    def _estimate(self) -> tuple[list[float], list[float]]:
        """Estimate chances and expected tokens, once for each change of a memory."""
        usual = self._usual.chances()
        recent = self._recent.chances(usual)
        self._chances = recent, usual
        self._expected = _expected(recent), _expected(usual)
        return self._chances

    def _changed(self) -> None:
        self._chances = None
        self._optimistic.clear()


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

    def observe(self, reached: list[int], accepted: list[int]) -> None:
        """Count a step's drafts: how many reached each position, and were accepted there."""
        keep, num = math.exp(-reached[0] / self._window), len(reached)
        self._reached[:num] = [
            keep * old + new for old, new in zip(self._reached, reached, strict=False)
        ]
        self._accepted[:num] = [
            keep * old + new for old, new in zip(self._accepted, accepted, strict=False)
        ]

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

    def chances(self, shape: list[float] | None = None) -> list[float]:
        """Return the chance of each position.

        An unknown position has the chance of the position before it. With `shape`, the chances of a
        longer memory, the odds change from position to position as they do there.
        """
        chances: list[float] = []
        chance = shape[0] if shape else self._prior
        odds = _odds(chance)
        for position, (reached, accepted) in enumerate(
            zip(self._reached, self._accepted, strict=True)
        ):
            if shape and position:
                before, odds = odds, _odds(shape[position])
                ratio = odds / before * _odds(chance)
                chance = ratio / (1 + ratio)
            chance = (accepted + self.PRIOR_WEIGHT * chance) / (reached + self.PRIOR_WEIGHT)
            chances.append(chance)
        return chances

    def optimistic(self, chances: list[float], given: Gained) -> Gained:
        """Return the tokens gained, with optimism from the position on at which `given` ends."""
        num_given, optimistic, variance = len(given) - 1, given[-1], 0.0
        rate = upper = math.prod(chances[:num_given])
        for chance, reached in zip(chances[num_given:], self._reached[num_given:], strict=True):
            rate *= chance
            spread = chance * (1 - chance)
            least = chance if chance > 0.05 else 0.05
            weight = reached + self.PRIOR_WEIGHT
            variance += (spread if spread > 0.05 else 0.05) / weight / least**2
            highest = rate * (1 + 1.5 * math.sqrt(variance))
            if highest < upper:
                upper = highest
            optimistic += upper
            given.append(optimistic)
        return given


def _expected(chances: list[float]) -> Gained:
    return list(accumulate(accumulate(chances, mul), initial=1.0))


def _odds(chance: float) -> float:
    chance = 0.01 if chance < 0.01 else 0.99 if chance > 0.99 else chance
    return chance / (1 - chance)
