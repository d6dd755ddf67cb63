"""How long an engine step takes, for any batch size and arm, learned from `StepReport`s.

The estimates forget slowly and say how sure they are. They are pure arithmetic on a few dozen
numbers: an update costs microseconds, and memory does not grow with time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

from tlt.contracts import Arm, DrafterName, StepReport

MAX_RATIO = 4.0
"""Largest ratio between the measured and the expected time of a step that counts. A pause of the
machine says nothing about an arm, yet estimates follow a lasting change."""


class StepTime:
    """Seconds of an engine step, for any batch size and arm.

    A fit to all steps predicts arms and batch sizes that were never tried. The fit is a sum of
    parts, each proportional to one figure of the step and never negative. Where an arm was tried,
    the measured times of its steps correct the fit. All times are relative to the recent pace:
    machines are shared and contexts grow, and an arm last timed in a slow minute is not slower.
    """

    HALF_LIFE = 1000.0
    """Engine steps after which the fit trusts an observation half as much."""
    _GROWTH = 2 ** (1 / HALF_LIFE)
    CELL_WINDOW = 160.0
    """Engine steps that the correction of one arm and batch size remembers."""
    CELL_PRIOR = 5.0
    """Weight of the fit against the correction, in engine steps."""
    PACE_WINDOW, PACE_STEPS = 24.0, 12.0
    """Engine steps over which the pace is averaged, and steps that an arm needs to contribute."""
    JUMP, JUMP_STEPS = 1.5, 3
    """Ratio to a well-known arm's expected time above which the machine has changed, not the arm;
    and the number of such steps in a row after which the pace follows immediately."""
    SOLVE_EVERY = 4
    """Engine steps between two solutions of the fit, once it has seen some dozens."""
    ROWS, PREFILL = 64.0, 512.0
    """Scales of requests and of prefilled tokens in the fit's inputs."""

    def __init__(self, arms: frozenset[Arm]) -> None:
        drafters: list[DrafterName] = sorted({a.drafter for a in arms if a.num_draft_tokens})
        self._first_input = {drafter: 4 + 3 * i for i, drafter in enumerate(drafters)}
        """Index of each drafter's first input of the fit."""
        size = 4 + 3 * len(drafters)
        self._normal = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._parts = [0.0] * size
        self._scale = 0.0
        self._pace = 1.0
        self._jumps: list[float] = []
        """Logarithms of the ratios to the expected time of the latest steps in a row that told of
        the machine."""
        self._growth = 1.0
        self._alike: tuple[Arm, int, int, int] | None = None
        """Inputs of the latest engine steps, which the least squares do not hold yet; the next two
        are sums over these steps."""
        self._alike_weight = self._alike_target = 0.0
        self._unsolved = 0
        self._solved = 0
        """Number of solutions of the fit so far."""
        self._least_s = 1e-9
        self._times: dict[Arm, ArmTime] = {}
        self._error: dict[str, float] = dict.fromkeys(["off", *drafters], 0.4)
        """Typical relative error of the fit without correction, by drafter."""

    @property
    def known(self) -> bool:
        """Whether any step was timed."""
        return self._scale > 0

    def observe(self, report: StepReport, steady: bool) -> None:
        """Learn from an engine step. `steady` steps verified and drafted with the same arm."""
        elapsed_s = report.elapsed_s
        if not (math.isfinite(elapsed_s) and elapsed_s > 0):
            return
        if not self.known:
            self._start(elapsed_s)
        time, prefill_s = self.of(report.proposed), self._prefill_s(report.num_prefill_tokens)
        fitted_s = self._fit(time, report.num_decodes, report.num_draft_tokens, prefill_s)
        elapsed_s /= self._pace
        elapsed_s = min(max(elapsed_s, fitted_s / MAX_RATIO), fitted_s * MAX_RATIO)
        if steady and report.num_decodes > 0 and prefill_s < 0.5 * min(elapsed_s, fitted_s):
            if self._follow_pace(report, time, elapsed_s - prefill_s):
                return
            self._correct(report, time, elapsed_s - prefill_s, fitted_s - prefill_s)
        self._refit(report, elapsed_s)

    def _follow_pace(self, report: StepReport, time: ArmTime, elapsed_s: float) -> bool:
        """Update the pace from arms with well-known times; errors of other arms would spread.

        Return whether the step shows only the machine's pace. A machine that stalls for minutes
        would make the arm in use look slow next to arms last timed before, and rare trials take
        hundreds of steps to find that out.
        """
        expected_s, visits = self._usual_s(time, report.num_decodes, report.num_draft_tokens)
        if visits < self.PACE_STEPS:
            return False
        surprise = math.log(elapsed_s / expected_s)
        self._pace *= math.exp(min(0.4, max(-0.4, surprise)) / self.PACE_WINDOW)
        if abs(surprise) < math.log(self.JUMP):
            self._jumps.clear()
            return False
        if self._jumps and self._jumps[-1] * surprise < 0:
            self._jumps.clear()
        self._jumps.append(surprise)
        if len(self._jumps) == self.JUMP_STEPS:
            self._pace *= math.exp(min(self._jumps, key=abs))
            self._jumps.clear()
        return True

    def prefill_s(self, num_prefill_tokens: int) -> float:
        """Return the seconds of a step that prompts took."""
        return self._pace * self._prefill_s(num_prefill_tokens)

    def _prefill_s(self, num_prefill_tokens: int) -> float:
        return self._parts[3] * num_prefill_tokens / self.PREFILL

    def expected_s(
        self, num_decodes: int, draft_tokens: float, time: ArmTime
    ) -> tuple[float, float, float]:
        """Return the expected seconds of a step without prefills, and how sure they are.

        That is their relative error, and the arm's number of steps at about this batch size; nearby
        sizes count half.
        """
        seconds, visits = self._usual_s(time, num_decodes, draft_tokens)
        error = self._error[time.arm.drafter] / math.sqrt(1 + visits)
        return self._pace * seconds, error, visits

    def _usual_s(self, time: ArmTime, num_decodes: int, draft_tokens: float) -> tuple[float, float]:
        """Return the expected seconds at the usual pace, and the arm's number of steps."""
        asked = (num_decodes, draft_tokens, self._solved)
        if time.asked == asked:
            return time.usual_s
        weight = total = 0.0
        for place, near in _around(num_decodes) if time.cells else ():
            if (cell := time.cells.get(place)) is None:
                continue
            if cell.solved != self._solved:
                cell.ratio = cell.seconds / self._fit(time, cell.num_decodes, cell.draft_tokens)
                cell.solved = self._solved
            share = near * cell.weight
            weight += share
            total += share * cell.ratio
        ratio = (total + self.CELL_PRIOR) / (weight + self.CELL_PRIOR)
        time.asked = asked
        time.usual_s = self._fit(time, num_decodes, draft_tokens) * ratio, weight
        return time.usual_s

    def _inputs(
        self, arm: Arm, num_decodes: int, num_draft_tokens: int, num_prefill_tokens: int
    ) -> list[tuple[int, float]]:
        """Return the fit's inputs, as pairs of index and value; all other inputs are 0.

        They are 1, decodes, drafts to verify, prefilled tokens, and per drafter: on, passes, rows
        of all passes. Their scales are the prior: a cost that several inputs could explain goes
        mostly to the largest input, so slow large batches do not make small ones look slow.
        """
        rows, passes = num_decodes / self.ROWS, arm.num_draft_tokens
        inputs = [(0, 1.0), (1, rows), (2, num_draft_tokens / self.ROWS)]
        inputs.append((3, num_prefill_tokens / self.PREFILL))
        first = self._first_input.get(arm.drafter)
        if first is not None:
            inputs += [(first, 0.2), (first + 1, passes / 8), (first + 2, passes * rows)]
        return [(index, value) for index, value in inputs if value]

    def _start(self, first_s: float) -> None:
        """Start the fit with the guess that drafts cost a little, relative to the first step."""
        self._scale, self._least_s = first_s, max(1e-3 * first_s, 1e-9)
        self._solved += 1
        guess = [0.9, 0.05, 0.05, 1.0]
        guess += [0.1, 0.1, 0.02] * len(self._first_input)
        for index, part in enumerate(guess):
            self._parts[index] = part * first_s
            self._normal[index][index] = 0.05
            self._target[index] = 0.05 * part

    def of(self, arm: Arm) -> ArmTime:
        """Return the times of an arm, which stay its times."""
        time = self._times.get(arm)
        if time is None:
            time = self._times[arm] = ArmTime(arm)
        return time

    def _price(self, time: ArmTime) -> None:
        """Fit the seconds of an arm by the latest solution: the parts times `_inputs`."""
        parts, passes = self._parts, time.arm.num_draft_tokens
        time.fixed_s, time.decode_s = parts[0], parts[1] / self.ROWS
        time.draft_token_s = parts[2] / self.ROWS
        first = self._first_input.get(time.arm.drafter)
        if first is not None:
            time.fixed_s += parts[first] * 0.2 + parts[first + 1] * (passes / 8)
            time.decode_s += parts[first + 2] * passes / self.ROWS
        time.solved = self._solved

    def _fit(
        self, time: ArmTime, num_decodes: float, draft_tokens: float, prefill_s: float = 0.0
    ) -> float:
        """Return the fitted seconds of a step."""
        if time.solved != self._solved:
            self._price(time)
        fitted_s = time.fixed_s + time.decode_s * num_decodes + time.draft_token_s * draft_tokens
        fitted_s += prefill_s
        return fitted_s if fitted_s > self._least_s else self._least_s

    def _refit(self, report: StepReport, elapsed_s: float) -> None:
        """Update the least squares of relative errors, in which newer steps weigh more.

        Deciding must cost almost nothing: weights of new steps grow instead of all sums shrinking,
        and one sweep of coordinate descent every few steps solves the fit.
        """
        num_drafted, num_prefilled = report.num_draft_tokens, report.num_prefill_tokens
        inputs = report.proposed, report.num_decodes, num_drafted, num_prefilled
        if inputs != self._alike:
            self._add_alike()
            self._alike = inputs
        self._growth *= self._GROWTH
        weight = self._growth * (self._scale / elapsed_s) ** 2
        self._alike_weight += weight
        self._alike_target += weight * (elapsed_s / self._scale)
        self._unsolved += 1
        if self._unsolved >= self.SOLVE_EVERY or self._growth < 1.05:
            self._solve()

    def _add_alike(self) -> None:
        """Add the latest engine steps, all with the same inputs, to the least squares."""
        if self._alike is not None:
            inputs = self._inputs(*self._alike)
            for index, left in inputs:
                row, share = self._normal[index], self._alike_weight * left
                for other, right in inputs:
                    row[other] += share * right
                self._target[index] += self._alike_target * left
        self._alike, self._alike_weight, self._alike_target = None, 0.0, 0.0

    def _solve(self) -> None:
        self._add_alike()
        self._unsolved = 0
        self._solved += 1
        parts = [part / self._scale for part in self._parts]
        for index, row in enumerate(self._normal):
            diagonal = row[index] + 1e-3 * self._growth
            slope = self._target[index] - sum(map(mul, row, parts))
            parts[index] = max(0.0, parts[index] + slope / diagonal)
        self._parts = [part * self._scale for part in parts]
        if self._growth > 1e6:
            self._normal = [[value / self._growth for value in row] for row in self._normal]
            self._target = [value / self._growth for value in self._target]
            self._growth = 1.0

    def _correct(
        self, report: StepReport, time: ArmTime, elapsed_s: float, fitted_s: float
    ) -> None:
        bucket, time.asked = batch_bucket(report.num_decodes), None
        cell = time.cells.get(bucket)
        if cell is None:
            cell = time.cells[bucket] = _Cell()
        if cell.weight < 1:  # the first step of a cell shows the error of the fit alone
            miss = min(abs(math.log(elapsed_s / fitted_s)), 0.5)
            error = self._error[report.proposed.drafter]
            self._error[report.proposed.drafter] = max(0.05, error + 0.2 * (miss - error))
        cell.weight = min(cell.weight + 1, self.CELL_WINDOW)
        cell.seconds += (elapsed_s - cell.seconds) / cell.weight
        cell.draft_tokens += (report.num_draft_tokens - cell.draft_tokens) / cell.weight
        cell.num_decodes += (report.num_decodes - cell.num_decodes) / cell.weight
        cell.solved = -1


@dataclass(slots=True)
class _Cell:
    """Means over the latest steps of one arm in one bucket of batch sizes."""

    weight: float = 0.0
    seconds: float = 0.0
    draft_tokens: float = 0.0
    num_decodes: float = 0.0
    ratio: float = 1.0
    """Ratio of the seconds to the fit's."""
    solved: int = -1
    """Number of the solution that `ratio` comes from."""


@dataclass(slots=True)
class ArmTime:
    """Times of one arm."""

    arm: Arm
    cells: dict[int, _Cell] = field(default_factory=dict)
    """The arm's timed steps by bucket of batch sizes; empty if it was never timed."""
    solved: int = -1
    """Number of the solution behind the fitted seconds: per step, per decode, and per draft token
    to verify."""
    fixed_s: float = 0.0
    decode_s: float = 0.0
    draft_token_s: float = 0.0
    asked: tuple[int, float, int] | None = None
    """Decodes, draft tokens and solution of the latest estimate, unless the arm was timed since."""
    usual_s: tuple[float, float] = (0.0, 0.0)
    """That estimate."""


@lru_cache(4096)
def _around(num_decodes: int) -> tuple[tuple[int, float], ...]:
    """Return a batch size's bucket and its two neighbours, each with its nearness."""
    bucket = batch_bucket(num_decodes)
    return (
        (bucket, 1.0),
        (batch_bucket(bucket * 2 // 3), 0.5),
        (batch_bucket(bucket + 1), 0.5),
    )


@lru_cache(4096)
def batch_bucket(num_decodes: int) -> int:
    """Return the bucket of a batch size: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, ..."""
    if num_decodes <= 2:
        return num_decodes
    top = 1 << (num_decodes - 1).bit_length()
    return top if num_decodes > 3 * top // 4 else 3 * top // 4
