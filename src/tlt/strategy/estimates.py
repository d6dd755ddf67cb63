"""What the adaptive strategy believes: how many drafts are accepted, and how long a step takes.

Both are learned from `StepReport`s while the engine works, forget slowly, and say how sure they
are. Pure arithmetic on a few dozen numbers: a step costs microseconds beside an engine step of
milliseconds, and memory does not grow with time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tlt.contracts import Arm, DrafterName, StepReport

MAX_RATIO = 4.0
"""A step this many times slower or faster than expected counts as this much: a pause of the machine
is no news about an arm, yet a lasting change is followed."""


class Acceptance:
    """How often one drafter's tokens are accepted, position by position.

    What is learned is the chance that a position is accepted once those before it are. It does not
    depend on the draft length: every length teaches all shorter ones, and where text turns hard,
    the first positions say so for the later ones, which shorter drafts do not reach.

    Two memories. The short one follows the text, which turns from easy to hard within a response:
    it tells the lengths of one drafter apart. The long one tells drafters apart: one that was last
    tried on easy text must not seem better than the one that has hard text to draft now. What the
    short one has seen too little of, it takes from the long one: how chances change from one
    position to the next.

    A few latest drafts tell when a memory is out of date. They replace the short one as soon as
    they do not fit it. They replace the long one only where a trial shows it (`believe_latest`).
    """

    LATEST, RECENT, USUAL = 24.0, 120.0, 2000.0
    """Verified requests that are remembered."""
    OTHER_TEXT = 16.0
    """Verified requests that usual text counts for, where other requests have started."""

    def __init__(self, max_draft_tokens: int, prior: float = 0.3) -> None:
        self._latest = _Chances(max_draft_tokens, self.LATEST, prior)
        self._recent = _Chances(max_draft_tokens, self.RECENT, prior)
        self._usual = _Chances(max_draft_tokens, self.USUAL, prior)
        self._verified = [0.0] * max_draft_tokens
        """Requests whose draft was at least so long."""
        self._offered = 0.0
        self._drafted = 0.0

    def observe(self, report: StepReport) -> bool:
        """Learn from the drafts that a step verified. Return whether the text has turned: the
        latest drafts do not fit the short memory."""
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
        return self._verified[0]

    def seen(self, arm: Arm) -> bool:
        """Whether enough drafts of this length were verified to judge it."""
        return self._verified[arm.num_draft_tokens - 1] >= 4

    def forget(self, weight: float) -> None:
        """Keep the rates but trust them no more than `weight` requests: the drafter has changed."""
        self._latest.forget(0.0)
        self._recent.forget(weight)
        self._usual.forget(weight)

    @property
    def ease(self) -> float:
        """How much more often than usual the first draft token is accepted at the moment."""
        return self._recent.first / self._usual.first

    def begin(self) -> None:
        """The drafter takes over: only drafts from now on count as its latest."""
        self._latest.forget(0.0)

    def believe_latest(self, ease: float) -> bool:
        """Let the latest drafts replace both memories if they do not fit the long one. Return
        whether they did. `ease` is that of the drafter in use: text that is easy or hard for both
        is no news."""
        changed = self._latest.differs_from(self._usual, ease)
        if changed:
            self._recent.become(self._latest, self.LATEST)
            self._usual.become(self._latest, self.LATEST)
        return changed

    def expect_other_text(self) -> None:
        """Other requests are running: usual text until they say otherwise."""
        self._recent.become(self._usual, self.OTHER_TEXT)

    @property
    def drafted_share(self) -> float:
        """Drafted tokens per token asked for: 1 for a model, less for a lookup without a match."""
        return self._drafted / self._offered if self._offered > 0 else 1.0

    def recent_tokens(self, num_draft_tokens: int, in_use: int = 0) -> tuple[float, float]:
        """Tokens a request gains by a step with this draft length, in the text of the moment:
        expected, and what might be hoped for beside drafts of the length in use, which share
        their first positions, for better or worse."""
        return self._recent.tokens(num_draft_tokens, in_use, self._usual.chances(num_draft_tokens))

    def usual_tokens(self, num_draft_tokens: int) -> tuple[float, float]:
        """The same over all text, beside other drafters."""
        return self._usual.tokens(num_draft_tokens, 0)


class _Chances:
    """Of each draft position: the chance to be accepted once those before it are."""

    PRIOR_WEIGHT = 6.0
    MIN_DRAFTS, DEVIATIONS = 6.0, 3.0
    """Drafts from which two memories are compared, and standard errors that are no chance."""

    def __init__(self, num_positions: int, window: float, prior: float) -> None:
        self._window = window
        self._prior = prior
        self._reached = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def observe(self, reached: list[int]) -> None:
        """Of so many drafts, so many were accepted up to each position."""
        keep = math.exp(-reached[0] / self._window)
        for position, (before, accepted) in enumerate(pairwise(reached)):
            self._reached[position] = keep * self._reached[position] + before
            self._accepted[position] = keep * self._accepted[position] + accepted

    def forget(self, weight: float) -> None:
        keep = min(1.0, weight / max(self._reached[0], 1.0))
        self._reached = [keep * reached for reached in self._reached]
        self._accepted = [keep * accepted for accepted in self._accepted]

    def become(self, other: _Chances, weight: float) -> None:
        self._reached, self._accepted = list(other._reached), list(other._accepted)
        self.forget(weight)

    @property
    def first(self) -> float:
        """Chance of the first position."""
        weight = self._reached[0] + self.PRIOR_WEIGHT
        return (self._accepted[0] + self.PRIOR_WEIGHT * self._prior) / weight

    def differs_from(self, other: _Chances, ease: float = 1.0) -> bool:
        """Whether the first position does not do `ease` times as well as in the other memory, by
        more than chance explains."""
        num, num_other = self._reached[0], other._reached[0]
        if num < self.MIN_DRAFTS or num_other < self.MIN_DRAFTS:
            return False
        expected = min(0.95, max(0.05, ease * other._accepted[0] / num_other))
        variance = expected * (1 - expected) * (1 / num + 1 / num_other)
        return abs(self._accepted[0] / num - expected) > self.DEVIATIONS * math.sqrt(variance)

    def chances(self, num_draft_tokens: int, shape: list[float] | None = None) -> list[float]:
        """Of each position. Until it is known, a position does as the one before it, or, beside the
        chances of a longer memory (`shape`), better or worse than it by the same odds."""
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
        """Expected, and optimistic about all but the first `num_given` positions."""
        expected = optimistic = rate = hope = 1.0
        variance = 0.0
        for position, chance in enumerate(self.chances(num_draft_tokens, shape)):
            rate *= chance
            if position >= num_given:
                weight = self._reached[position] + self.PRIOR_WEIGHT
                variance += max(chance * (1 - chance), 0.05) / weight / max(chance, 0.05) ** 2
            hope = min(hope, rate * (1 + 1.5 * math.sqrt(variance)))
            expected += rate
            optimistic += hope
        return expected, optimistic


def _odds(chance: float) -> float:
    chance = min(max(chance, 0.01), 0.99)
    return chance / (1 - chance)


class StepTime:
    """Seconds of an engine step, for any batch and arm.

    A sum of parts, each proportional to one figure of the step and never negative, is fitted to all
    steps; it speaks for arms and batch sizes that were never tried. Where an arm was tried, what
    its steps really took corrects it. All of it is relative to the pace of the moment: machines are
    shared and contexts grow, and an arm that was last timed in a slow minute is no slower for it.
    """

    HALF_LIFE = 1000.0
    """Steps after which the fit trusts an observation half as much."""
    CELL_WINDOW = 160.0
    """Steps of one arm and batch size that its correction remembers."""
    CELL_PRIOR = 5.0
    """Steps that the fit counts for, beside those of one arm and batch size."""
    PACE_WINDOW, PACE_STEPS = 24.0, 12.0
    """Steps over which the pace is taken, of arms that were timed at least so often."""
    SOLVE_EVERY = 4
    """Steps between two solutions of the fit, once it has seen some dozens."""
    ROWS, PREFILL = 64.0, 512.0

    def __init__(self, arms: frozenset[Arm]) -> None:
        self._drafters: list[DrafterName] = sorted({a.drafter for a in arms if a.num_draft_tokens})
        size = 4 + 3 * len(self._drafters)
        self._normal = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._parts = [0.0] * size
        self._scale = 0.0
        self._pace = 1.0
        self._growth = 1.0
        self._unsolved = 0
        self._cells: dict[tuple[int, Arm], _Cell] = {}
        self._timed: set[Arm] = set()
        self._error: dict[str, float] = dict.fromkeys(["off", *self._drafters], 0.4)
        """Typical relative error of the fit alone, by drafter, where it was not corrected yet."""

    @property
    def known(self) -> bool:
        return self._scale > 0

    def observe(self, report: StepReport, steady: bool) -> None:
        """Learn from a step; `steady` if it verified and drafted by the same arm."""
        elapsed_s = report.elapsed_s
        if not (math.isfinite(elapsed_s) and elapsed_s > 0):
            return
        inputs = self._inputs(
            report.num_decodes,
            report.num_draft_tokens,
            report.num_prefill_tokens,
            report.proposed,
        )
        if not self.known:
            self._start(elapsed_s)
        fitted_s = self._fit(inputs)
        elapsed_s /= self._pace
        elapsed_s = min(max(elapsed_s, fitted_s / MAX_RATIO), fitted_s * MAX_RATIO)
        prefill_s = self._prefill_s(report.num_prefill_tokens)
        if steady and report.num_decodes > 0 and prefill_s < 0.5 * min(elapsed_s, fitted_s):
            self._follow_pace(report, elapsed_s - prefill_s)
            self._correct(report, elapsed_s - prefill_s, fitted_s - prefill_s)
        self._refit(inputs, elapsed_s)

    def _follow_pace(self, report: StepReport, elapsed_s: float) -> None:
        """By a step whose time is known well: the rest would make its own error everyone's."""
        if self.visits(report.num_decodes, report.proposed) >= self.PACE_STEPS:
            expected_s = self._usual_s(
                report.num_decodes, report.num_draft_tokens, report.proposed
            )[0]
            surprise = min(0.4, max(-0.4, math.log(elapsed_s / expected_s)))
            self._pace *= math.exp(surprise / self.PACE_WINDOW)

    def prefill_s(self, num_prefill_tokens: int) -> float:
        """Seconds of a step that went into prompts."""
        return self._pace * self._prefill_s(num_prefill_tokens)

    def _prefill_s(self, num_prefill_tokens: int) -> float:
        return self._parts[3] * num_prefill_tokens / self.PREFILL

    def expected_s(self, num_decodes: int, draft_tokens: float, arm: Arm) -> tuple[float, float]:
        """Seconds of a step without prefills, and the relative error to expect of that."""
        seconds, error = self._usual_s(num_decodes, draft_tokens, arm)
        return self._pace * seconds, error

    def _usual_s(self, num_decodes: int, draft_tokens: float, arm: Arm) -> tuple[float, float]:
        fitted_s = self._fit(self._inputs(num_decodes, draft_tokens, 0, arm))
        weight = total = 0.0
        for near, cell in self._near(num_decodes, arm):
            inputs = self._inputs(cell.num_decodes, cell.draft_tokens, 0, arm)
            weight += near * cell.weight
            total += near * cell.weight * cell.seconds / self._fit(inputs)
        ratio = (total + self.CELL_PRIOR) / (weight + self.CELL_PRIOR)
        return fitted_s * ratio, self._error[arm.drafter] / math.sqrt(1 + weight)

    def visits(self, num_decodes: int, arm: Arm) -> float:
        """Steps of this arm seen at about this batch size, or, counting less, at others near."""
        return sum(near * cell.weight for near, cell in self._near(num_decodes, arm))

    def timed(self, arm: Arm) -> bool:
        """Whether a step of this arm was ever seen, at any batch size."""
        return arm in self._timed

    def _near(self, num_decodes: int, arm: Arm) -> Iterator[tuple[float, _Cell]]:
        bucket = batch_bucket(num_decodes)
        beside = (batch_bucket(bucket * 2 // 3), batch_bucket(bucket + 1))
        for place, near in ((bucket, 1.0), (beside[0], 0.5), (beside[1], 0.5)):
            cell = self._cells.get((place, arm))
            if cell is not None:
                yield near, cell

    def _inputs(
        self, num_decodes: float, draft_tokens: float, num_prefill_tokens: int, proposed: Arm
    ) -> list[float]:
        """1, decodes, drafts to verify, prefilled tokens; per drafter: on, passes, rows of them.

        Their scales are the prior: of a cost that several could explain, most goes to the largest,
        so what was slow in a large batch is not thought to be slow in a small one.
        """
        inputs = [
            1.0,
            num_decodes / self.ROWS,
            draft_tokens / self.ROWS,
            num_prefill_tokens / self.PREFILL,
        ]
        for drafter in self._drafters:
            passes = proposed.num_draft_tokens if proposed.drafter == drafter else 0
            inputs += [0.2 * (passes > 0), passes / 8, passes * num_decodes / self.ROWS]
        return inputs

    def _start(self, first_s: float) -> None:
        """Before anything is known: drafts cost a little, in units of the first step."""
        self._scale = first_s
        guess = [0.9, 0.05, 0.05, 1.0] + [0.1, 0.1, 0.02] * len(self._drafters)
        for index, part in enumerate(guess):
            self._parts[index] = part * first_s
            self._normal[index][index] = 0.05
            self._target[index] = 0.05 * part

    def _fit(self, inputs: list[float]) -> float:
        total = sum(part * value for part, value in zip(self._parts, inputs, strict=True))
        return max(total, 1e-3 * self._scale, 1e-9)

    def _refit(self, inputs: list[float], elapsed_s: float) -> None:
        """Least squares of relative errors, newer steps weighing more.

        Weights grow instead of all sums shrinking, and the sums are solved by a sweep of coordinate
        descent every few steps: deciding must cost next to nothing.
        """
        self._growth *= 2 ** (1 / self.HALF_LIFE)
        weight = self._growth * (self._scale / elapsed_s) ** 2
        relative = elapsed_s / self._scale
        active = [(index, value) for index, value in enumerate(inputs) if value]
        for index, left in active:
            row = self._normal[index]
            for other, right in active:
                row[other] += weight * left * right
            self._target[index] += weight * left * relative
        self._unsolved += 1
        if self._unsolved >= self.SOLVE_EVERY or self._growth < 1.05:
            self._solve()

    def _solve(self) -> None:
        self._unsolved = 0
        parts = [part / self._scale for part in self._parts]
        for index, row in enumerate(self._normal):
            diagonal = row[index] + 1e-3 * self._growth
            slope = self._target[index] - sum(a * p for a, p in zip(row, parts, strict=True))
            parts[index] = max(0.0, parts[index] + slope / diagonal)
        self._parts = [part * self._scale for part in parts]
        if self._growth > 1e6:
            self._normal = [[value / self._growth for value in row] for row in self._normal]
            self._target = [value / self._growth for value in self._target]
            self._growth = 1.0

    def _correct(self, report: StepReport, elapsed_s: float, fitted_s: float) -> None:
        self._timed.add(report.proposed)
        key = (batch_bucket(report.num_decodes), report.proposed)
        cell = self._cells.setdefault(key, _Cell())
        if cell.weight < 1:  # the first look at a cell tells how good the fit is by itself
            miss = min(abs(math.log(elapsed_s / fitted_s)), 0.5)
            error = self._error[report.proposed.drafter]
            self._error[report.proposed.drafter] = max(0.05, error + 0.2 * (miss - error))
        cell.weight = min(cell.weight + 1, self.CELL_WINDOW)
        cell.seconds += (elapsed_s - cell.seconds) / cell.weight
        cell.draft_tokens += (report.num_draft_tokens - cell.draft_tokens) / cell.weight
        cell.num_decodes += (report.num_decodes - cell.num_decodes) / cell.weight


@dataclass(slots=True)
class _Cell:
    """Means over the latest steps of one arm in one bucket of batch sizes."""

    weight: float = 0.0
    seconds: float = 0.0
    draft_tokens: float = 0.0
    num_decodes: float = 0.0


def batch_bucket(num_decodes: int) -> int:
    """Batch sizes that behave alike: 1, 2, 3-4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, ..."""
    if num_decodes <= 2:
        return num_decodes
    top = 1 << (num_decodes - 1).bit_length()
    return top if num_decodes > 3 * top // 4 else 3 * top // 4
