"""What the adaptive policy believes: how many drafts are accepted, and how long a step takes.

Both are learned from `StepReport`s while the engine works, forget slowly, and say how sure they
are. Pure arithmetic on a few dozen numbers: a step costs microseconds beside an engine step of
milliseconds, and memory does not grow with time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlt.contracts import Arm, DrafterName, StepReport

MAX_RATIO = 4.0
"""A step this many times slower or faster than expected counts as this much: a pause of the machine
is no news about an arm, yet a lasting change is followed."""


class Acceptance:
    """How often one drafter's token at each position is accepted.

    The rate of position i is the share of requests whose draft is accepted at least up to there. It
    does not depend on the draft length, so that every length teaches all shorter ones.
    """

    WINDOW = 400.0
    """Verified requests that are remembered: enough for 2.5% precision, few enough to follow a
    drafter that is being trained or text that changes."""
    ALARM, ALARM_WINDOW = 4.0, 40.0
    """Standard deviations, over so many requests, at which the past no longer counts."""
    PRIOR = 0.3
    PRIOR_WEIGHT = 2.0

    def __init__(self, max_draft_tokens: int) -> None:
        self._seen = [0.0] * max_draft_tokens
        self._accepted = [0.0] * max_draft_tokens
        self._offered = 0.0
        self._drafted = 0.0
        self._surprise = 0.0
        self._surprise_variance = 0.0

    def observe(self, report: StepReport) -> None:
        """Learn from the drafts that a step verified."""
        length = min(report.verified.num_draft_tokens, len(self._seen))
        num_requests = max(report.num_decodes, report.num_drafts)
        if length == 0 or num_requests <= 0:
            return
        self._watch_for_change(num_requests, report.accepted_at[0] if report.accepted_at else 0)
        keep = math.exp(-num_requests / self.WINDOW)
        for position in range(length):
            accepted = report.accepted_at[position] if position < len(report.accepted_at) else 0
            self._seen[position] = keep * self._seen[position] + num_requests
            self._accepted[position] = keep * self._accepted[position] + accepted
        self._offered = keep * self._offered + num_requests * length
        self._drafted = keep * self._drafted + min(
            report.num_draft_tokens, num_requests * report.verified.num_draft_tokens
        )

    def _watch_for_change(self, num_requests: int, accepted: int) -> None:
        """Start afresh when the first position does far better or worse than it used to."""
        keep = math.exp(-num_requests / self.ALARM_WINDOW)
        rate = (self._accepted[0] + 0.5) / (self._seen[0] + 1)
        self._surprise = keep * self._surprise + accepted - num_requests * rate
        self._surprise_variance = keep * self._surprise_variance + num_requests * max(
            rate * (1 - rate), 0.02
        )
        if self._surprise**2 > self.ALARM**2 * self._surprise_variance and self._seen[0] > 16:
            self.forget(weight=0.5)
            self._surprise = self._surprise_variance = 0.0

    def seen(self, arm: Arm) -> bool:
        """Whether enough drafts of this length were verified to judge it."""
        return self._seen[arm.num_draft_tokens - 1] >= 4

    def forget(self, weight: float) -> None:
        """Keep the rates but trust them no more than `weight` requests: the drafter has changed."""
        for position, seen in enumerate(self._seen):
            if seen > weight:
                self._accepted[position] *= weight / seen
                self._seen[position] = weight

    @property
    def drafted_share(self) -> float:
        """Drafted tokens per token asked for: 1 for a model, less for a lookup without a match."""
        return self._drafted / self._offered if self._offered > 0 else 1.0

    def expected_tokens(self, num_draft_tokens: int) -> tuple[float, float]:
        """Tokens a request gains by a step with this draft length: expected, and optimistic."""
        expected = optimistic = 1.0
        rate, ratio, hope = 1.0, self.PRIOR, 1.0
        for position in range(min(num_draft_tokens, len(self._seen))):
            weight = self._seen[position] + self.PRIOR_WEIGHT
            guess = rate * ratio  # an unseen position loses as much as the one before it did
            here = (self._accepted[position] + self.PRIOR_WEIGHT * guess) / weight
            here = min(rate, max(0.0, here))
            spread = math.sqrt(max(here * (1 - here), 0.05) / weight)
            ratio = here / rate if rate > 0 else 0.0
            rate, hope = here, min(hope, here + 1.5 * spread)
            expected += rate
            optimistic += hope
        return expected, optimistic


class StepTime:
    """Seconds of an engine step, for any batch and arm.

    A sum of parts, each proportional to one figure of the step and never negative, is fitted to all
    steps; it speaks for arms and batch sizes that were never tried. Where an arm was tried, what
    its steps really took corrects it.
    """

    HALF_LIFE = 1000.0
    """Steps after which the fit trusts an observation half as much."""
    CELL_WINDOW = 40.0
    """Steps of one arm and batch size that its correction remembers."""
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
        self._growth = 1.0
        self._unsolved = 0
        self._cells: dict[tuple[int, Arm], _Cell] = {}
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
        elapsed_s = min(max(elapsed_s, fitted_s / MAX_RATIO), fitted_s * MAX_RATIO)
        prefill_s = self.prefill_s(report.num_prefill_tokens)
        if steady and report.num_decodes > 0 and prefill_s < 0.5 * min(elapsed_s, fitted_s):
            self._correct(report, elapsed_s - prefill_s, fitted_s - prefill_s)
        self._refit(inputs, elapsed_s)

    def prefill_s(self, num_prefill_tokens: int) -> float:
        """Seconds of a step that went into prompts."""
        return self._parts[3] * num_prefill_tokens / self.PREFILL

    def expected_s(self, num_decodes: int, draft_tokens: float, arm: Arm) -> tuple[float, float]:
        """Seconds of a step without prefills, and the relative error to expect of that."""
        inputs = self._inputs(num_decodes, draft_tokens, 0, arm)
        fitted_s = self._fit(inputs)
        cell = self._cells.get((batch_bucket(num_decodes), arm))
        error = self._error[arm.drafter]
        if cell is None:
            return fitted_s, error
        ratio = cell.seconds / self._fit(self._inputs(cell.num_decodes, cell.draft_tokens, 0, arm))
        trust = cell.weight / (cell.weight + 1)
        return fitted_s * (1 + trust * (ratio - 1)), error / math.sqrt(1 + cell.weight)

    def visits(self, num_decodes: int, arm: Arm) -> float:
        """Steps of this arm seen at about this batch size."""
        cell = self._cells.get((batch_bucket(num_decodes), arm))
        return cell.weight if cell else 0.0

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
