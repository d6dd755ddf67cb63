"""The adaptive strategy: predict the tokens per second of every arm, and use the best arm.

    tokens per second = decodes x tokens gained per request / seconds of the step

Both halves are learned while the engine works (`acceptance`, `step_time`). All draft lengths of a
drafter share its acceptance, and all batch sizes share the step times, so that few arms ever need
a trial. A trial is a few engine steps spent on an arm to learn about it. Four rules keep the
strategy calm and safe:

- **Hysteresis and dwell.** The strategy changes the arm only for a gain of more than `margin`,
  keeps an arm for some steps, and changes at most `switches_per_s` times a second.
- **Trials have a budget.** Trials of promising arms may cost `probe_share` of the engine's time at
  each batch size. Trials of a drafter that is not in use may cost as much again per drafter, and
  twice as much while no drafter is in use. The budget bounds what a bad drafter can cost.
- **Like is compared with like.** Text turns from easy to hard within a response, for all drafters
  alike. The draft length follows the recent text; drafters are compared over all text.
- **Changes are noticed.** A new version of the drafter soon gets a trial. A drafter that is not in
  use gets a trial after its retry interval. Each failed trial doubles the interval, and a change of
  acceptance resets it. Drafts that do not fit the remembered acceptance replace it.

There is no clock but the seconds that steps report, and no random choice: the same reports give
the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from tlt.contracts import DRAFTERS, OFF, Arm, StepContext, StepReport
from tlt.strategy.acceptance import Acceptance
from tlt.strategy.step_time import MAX_RATIO, StepTime, batch_bucket

Times = Mapping[Arm, tuple[float, float]]
"""Seconds of a step of every arm: expected and optimistic."""
Trial = Literal["due", "promising"]
"""Why an arm gets a trial: its drafter's retry interval has passed, or its optimistic rate exceeds
the best arm's."""


@dataclass(frozen=True, slots=True)
class Caution:
    """How readily the strategy changes its mind."""

    margin: float = 0.03
    """Relative gain that is worth a change of arm."""
    dwell_steps: int = 4
    """Engine steps for which an arm is kept: drafts of one step are verified in the next."""
    switches_per_s: float = 10.0
    """Largest number of arm changes per second."""
    probe_share: float = 0.005
    """Share of the engine's time that trials may cost."""
    first_probes_steps: float = 4.0
    """Cost allowed for the first trials at a new batch size, in steps without drafts."""
    retry_interval_steps: int = 64
    """Engine steps until the next trial of a drafter that is not in use, if the budget allows. Each
    failed trial doubles the interval, up to 16x, or 2x while no drafter is in use. A change of
    acceptance resets it."""
    known_drafts: int = 50
    """Verified drafts after which a drafter gets a trial only when its retry interval has passed,
    as long as another drafter is in use."""


@dataclass(slots=True)
class _Spent:
    """Seconds of the engine, and the seconds that trials have cost."""

    busy_s: float = 0.0
    trials_s: float = 0.0


class Adaptive:
    """Chooses the arm with the best predicted throughput; see the module's docstring."""

    def __init__(self, arms: Collection[Arm], caution: Caution | None = None) -> None:
        self._caution = caution or Caution()
        self._arms = sorted({*arms, OFF}, key=lambda arm: (arm.drafter, arm.num_draft_tokens))
        self._lengths: dict[str, list[Arm]] = {}
        """The arms of each drafter, by rising draft length."""
        for arm in self._arms:
            if arm != OFF:
                self._lengths.setdefault(arm.drafter, []).append(arm)
        self._acceptance = {
            drafter: Acceptance(arms[-1].num_draft_tokens, DRAFTERS[drafter].prior)
            for drafter, arms in self._lengths.items()
        }
        self._time = StepTime(frozenset(self._arms))
        self._current = OFF
        self._settled = OFF
        self._trial: Trial | None = None
        self._steps_left = 0
        self._chosen_for = 0
        self._num_decodes = 0
        self._spent: dict[int, _Spent] = {}
        """Budgets for trials of promising arms, by batch size."""
        self._spent_due = {drafter: _Spent() for drafter in self._lengths}
        """Budgets for due trials, by drafter: trials of a bad drafter starve no other drafter."""
        self._switches = 3.0
        self._best_rate = 0.0
        self._version: int | None = None
        self._steps = 0
        self._last_used: dict[str, int] = {}
        """Engine step at which a draft of each drafter was last verified."""
        self._failed_trials: dict[str, int] = {}
        """Due trials of each drafter since acceptance last changed."""

    def arms(self) -> frozenset[Arm]:
        """Return every arm that may be chosen."""
        return frozenset(self._arms)

    # --- learning -----------------------------------------------------------------------------

    def observe(self, report: StepReport) -> None:
        """Learn from a finished engine step."""
        elapsed_s = report.elapsed_s
        if not (math.isfinite(elapsed_s) and elapsed_s > 0):
            elapsed_s = 0.0
        drafter = report.verified.drafter
        if drafter in self._acceptance and report.drafter_version == self._version:
            turned = self._acceptance[drafter].observe(report)
            if turned:
                self._failed_trials.clear()  # other drafters may do better now, too
        # A step that switches an EAGLE-3 drafter on includes its catch-up: not a usual step time.
        if report.proposed.drafter in ("off", report.verified.drafter):
            self._time.observe(report, steady=report.verified == report.proposed)
        expected_s = self._time.expected_s(report.num_decodes, 0, OFF)[0]
        elapsed_s = min(elapsed_s, 5 * MAX_RATIO * expected_s)
        spent = self._spent.setdefault(batch_bucket(report.num_decodes), _Spent())
        spent.busy_s += elapsed_s
        for due in self._spent_due.values():
            due.busy_s += elapsed_s
        if self._trial and self._best_rate > 0:
            decoding_s = elapsed_s - self._time.prefill_s(report.num_prefill_tokens)
            cost_s = max(0.0, decoding_s) - report.num_output_tokens / self._best_rate
            account = self._spent_due[self._current.drafter] if self._trial == "due" else spent
            account.trials_s = max(0.0, account.trials_s + cost_s)
        self._switches = min(3.0, self._switches + elapsed_s * self._caution.switches_per_s)
        self._steps += 1
        self._last_used[drafter] = self._steps

    # --- deciding -----------------------------------------------------------------------------

    def decide(self, context: StepContext) -> Arm:
        """Return the arm that drafts in the next engine step."""
        if context.drafter_version != self._version:
            if self._version is not None:
                for drafter, arms in self._lengths.items():
                    if arms[0].uses_model:
                        self._expect_change(drafter)
            self._version = context.drafter_version
        num_decodes = self._num_decodes = context.num_decodes or context.num_prefills
        self._steps_left -= 1
        if num_decodes <= 0 or not self._time.known:
            return self._current
        grown = num_decodes > 2 * self._chosen_for  # a new rollout has started
        if grown:
            self._chosen_for = num_decodes
            for acceptance in self._acceptance.values():
                acceptance.expect_other_text()
        elif self._steps_left > 0:
            return self._current
        if context.num_prefills > context.num_decodes and self._current == OFF:
            return OFF  # no trials while the batch fills up
        if self._trial and self._current.drafter not in ("off", self._settled.drafter):
            in_use = self._acceptance.get(self._settled.drafter)
            tried = self._acceptance[self._current.drafter]
            if tried.believe_latest(ease=in_use.ease if in_use else 1.0):
                self._failed_trials.clear()
        arm, trial = self._choose(num_decodes)
        if arm != self._current and self._switches >= 1:
            self._switches -= 1
            if arm.drafter != self._current.drafter and arm != OFF:
                self._acceptance[arm.drafter].begin()
            self._current = arm
            self._chosen_for = num_decodes
            self._trial = trial
            if not trial:
                self._settled = arm
            elif trial == "due":
                self._failed_trials[arm.drafter] = self._failed_trials.get(arm.drafter, 0) + 1
            self._steps_left = self._trial_steps(arm) if trial else self._caution.dwell_steps
        elif arm == self._current:
            self._chosen_for = num_decodes
            self._trial = trial
            self._steps_left = 2  # the same arm again: decide in two steps
        return self._current

    def _choose(self, num_decodes: int) -> tuple[Arm, Trial | None]:
        """Return the best arm; or an arm that gets a trial, and the reason for the trial."""
        times = self._times(num_decodes)
        rates = {arm: self._rate(num_decodes, arm, times) for arm in self._arms}
        best = self._best(num_decodes, {arm: rate for arm, (rate, _) in rates.items()}, times)
        self._best_rate = rates[best][0]
        gains = {
            arm: self._optimistic_gain(num_decodes, arm, best, times)
            for arm in self._arms
            if arm.drafter != "off"
        }
        gains[OFF] = rates[OFF][1] / self._best_rate
        worth = 1 + self._caution.margin
        promising = sorted((a for a in gains if gains[a] >= worth), key=lambda a: -gains[a])
        trials: list[tuple[Arm, Trial]] = []
        trials += [(arm, "due") for arm in self._due(num_decodes, times)]
        trials += [(arm, "promising") for arm in promising]
        for arm, trial in trials:
            if arm != best and self._may_try(arm, num_decodes, rates[arm][0], trial):
                return arm, trial
        self._failed_trials[best.drafter] = 0
        return best, None

    def _best(self, num_decodes: int, rates: dict[Arm, float], times: Times) -> Arm:
        """Return the arm with the best expected rate.

        Each drafter enters with its best draft length in recent text. Among these arms, the best
        in all text wins, provided that it beats plain decoding in recent text.
        """
        kept, margin = self._settled, self._caution.margin
        champions = {
            drafter: max(tried, key=lambda arm: rates[arm] * (1 + margin * (arm == kept)))
            for drafter, lengths in self._lengths.items()
            if (tried := [arm for arm in lengths if self._time.visits(num_decodes, arm) >= 1])
        }
        if not champions:
            return OFF

        def in_usual_text(arm: Arm) -> float:
            rate = self._rate(num_decodes, arm, times, usual=True)[0]
            return rate * (1 + margin * (arm.drafter == kept.drafter))

        champion = max(champions.values(), key=in_usual_text)
        favour = 1 + margin * (1 if kept == OFF else -1)
        return champion if rates[champion] >= favour * rates[OFF] else OFF

    def _optimistic_gain(self, num_decodes: int, arm: Arm, best: Arm, times: Times) -> float:
        """Return the ratio of the arm's optimistic rate to the best arm's rate.

        Optimism about acceptance ends once the acceptance of a drafter is known and another drafter
        is in use: only due trials remain. Otherwise optimism would rise wherever text is hard for
        the drafter in use, and such text is hard for all drafters. Optimism about the step time
        remains until the arm was timed at about this batch size: step times do not depend on text.
        """
        if best != OFF and arm.drafter != best.drafter:
            expected, optimistic = self._rate(num_decodes, arm, times, usual=True)
            if self._acceptance[arm.drafter].num_verified >= self._caution.known_drafts:
                seconds, least_s = times[arm]
                timed = self._time.visits(num_decodes, arm) >= 1
                optimistic = 0.0 if timed else expected * seconds / least_s
            return optimistic / self._rate(num_decodes, best, times, usual=True)[0]
        return self._rate(num_decodes, arm, times, in_use=best)[1] / self._best_rate

    def _trial_steps(self, arm: Arm) -> int:
        """Return the number of engine steps of a trial.

        A trial verifies about a dozen drafts. Unless it is the first trial of the arm, it includes
        a step that both verifies and drafts with the arm, for its time.
        """
        steps = min(math.ceil(12 / max(self._num_decodes, 1)), 6)
        is_first = arm != OFF and not self._acceptance[arm.drafter].seen(arm)
        return steps if is_first else steps + 1

    def _due(self, num_decodes: int, times: Times) -> list[Arm]:
        """Return the most promising arm of each drafter whose retry interval has passed."""

        def optimistic(arm: Arm) -> float:
            return self._rate(num_decodes, arm, times, usual=True)[1]

        due = []
        for drafter, lengths in self._lengths.items():
            # While no drafter is in use, trials stay frequent: the text may have become easy.
            doublings = min(4 if self._settled != OFF else 1, self._failed_trials.get(drafter, 0))
            steps = self._steps - self._last_used.get(drafter, 0)
            if steps > self._caution.retry_interval_steps << doublings:
                num_seen = sum(self._acceptance[drafter].seen(arm) for arm in lengths)
                due.append(max(lengths[: num_seen + 1], key=optimistic))
        return due

    def _may_try(self, arm: Arm, num_decodes: int, rate: float, trial: Trial) -> bool:
        """Return whether the arm may get a trial now.

        Shorter drafts go first: they are cheaper and teach about longer ones. No trial may cost
        more than the rest of its budget.
        """
        if arm.num_draft_tokens:
            lengths = self._lengths[arm.drafter]
            place = lengths.index(arm)
            if place and not self._acceptance[arm.drafter].seen(lengths[place - 1]):
                return False
        lost = max(0.0, 1 - rate / self._best_rate) if self._best_rate > 0 else 0.0
        step_s = self._time.expected_s(num_decodes, 0, arm)[0]
        cost_s = self._trial_steps(arm) * step_s * lost
        share = self._caution.probe_share
        if trial == "due":
            due = self._spent_due[arm.drafter]
            return due.trials_s + cost_s <= share * (1 + (self._settled == OFF)) * due.busy_s
        here = self._spent.get(batch_bucket(num_decodes), _Spent())
        first_s = self._caution.first_probes_steps * self._time.expected_s(num_decodes, 0, OFF)[0]
        return here.trials_s + cost_s <= first_s + share * here.busy_s

    def _times(self, num_decodes: int) -> Times:
        """Return the step times of all arms; they do not depend on the text.

        The optimistic time of an arm that was never timed at any batch size is at most that of the
        next shorter draft.
        """
        seconds, error = self._time.expected_s(num_decodes, 0, OFF)
        times = {OFF: (seconds, seconds * (1 - 0.5 * error))}
        for drafter, lengths in self._lengths.items():
            shorter_s = times[OFF][0]
            for arm in lengths:
                drafted = self._acceptance[drafter].drafted(arm.num_draft_tokens)
                draft_tokens = num_decodes * drafted
                seconds, error = self._time.expected_s(num_decodes, draft_tokens, arm)
                least_s = seconds * (1 - 0.5 * error)
                times[arm] = (
                    seconds,
                    least_s if self._time.timed(arm) else min(least_s, shorter_s),
                )
                shorter_s = seconds
        return times

    def _rate(
        self, num_decodes: int, arm: Arm, times: Times, usual: bool = False, in_use: Arm = OFF
    ) -> tuple[float, float]:
        """Return an arm's tokens per second: expected and optimistic.

        The rates are those in recent text, or in all text if `usual`. There is no optimism about
        draft positions that the arm `in_use` also verifies.
        """
        gained = optimistic = 1.0
        if arm.num_draft_tokens:
            acceptance = self._acceptance[arm.drafter]
            gained, optimistic = (
                acceptance.usual_tokens(arm.num_draft_tokens)
                if usual
                else acceptance.recent_tokens(arm.num_draft_tokens, in_use.num_draft_tokens)
            )
        seconds, least_s = times[arm]
        return num_decodes * gained / seconds, num_decodes * optimistic / least_s

    def _expect_change(self, drafter: str) -> None:
        """Try a drafter again soon that has become another one."""
        self._acceptance[drafter].forget(weight=24.0)
        self._steps_left = 0
        self._last_used.pop(drafter, None)
        self._failed_trials.pop(drafter, None)
