"""The adaptive strategy: predict the tokens per second of every arm, and use the best arm.

    tokens per second = decodes x tokens gained per request / seconds of the step

Both halves are learned while the engine works (`acceptance`, `step_time`). All draft lengths of a
drafter share its acceptance, and all batch sizes share the step times, so few arms ever need a
trial. A trial is a few engine steps spent on an arm to learn about it. Four rules keep the strategy
calm and safe:

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

The only clock is the seconds that steps report, and nothing is random: the same reports give the
same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from tlt.contracts import DRAFTERS, OFF, Arm, StepContext, StepReport
from tlt.strategy.acceptance import Acceptance
from tlt.strategy.step_time import MAX_RATIO, ArmTime, StepTime, batch_bucket

Trial = Literal["due", "promising"]
"""Why an arm gets a trial: its drafter's retry interval has passed, or its optimistic rate exceeds
the best arm's."""


@dataclass(frozen=True, slots=True)
class Caution:
    """How readily the strategy changes its arm."""

    margin: float = 0.03
    """Relative gain that is worth a change of arm."""
    dwell_steps: int = 4
    """Engine steps before an arm may change: drafts of one step are verified in the next."""
    switches_per_s: float = 10.0
    """Largest number of arm changes per second."""
    probe_share: float = 0.005
    """Share of the engine's time that trials may cost."""
    first_probes_steps: float = 4.0
    """Cost allowed for the first trials at a new batch size, in steps without drafts."""
    retry_interval_steps: int = 64
    """Engine steps until the next trial of a drafter that is not in use, if the budget allows. Each
    failed trial doubles the interval: at most four times, or once while no drafter is in use. A
    change of acceptance resets it."""
    known_drafts: int = 50
    """Verified drafts after which a drafter gets a trial only when its retry interval has passed,
    as long as another drafter is in use."""


@dataclass(slots=True)
class _Spent:
    """Seconds of the engine, and the seconds that trials have cost."""

    busy_s: float = 0.0
    trials_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Candidate:
    """An arm, and its expected gain at the batch size of the latest choice."""

    arm: Arm
    time: ArmTime
    seconds: float = 1.0
    """Seconds of a step."""
    least_s: float = 1.0
    """Seconds of a step, optimistic."""
    visits: float = 0.0
    """Timed steps at about this batch size."""
    rate: float = 0.0
    """Tokens per second in recent text."""


class Adaptive:
    """Chooses the arm with the best predicted throughput; see the module's docstring."""

    def __init__(self, arms: Collection[Arm], caution: Caution | None = None) -> None:
        self._caution = caution or Caution()
        self._time = StepTime(frozenset((OFF, *arms)))
        self._off = _Candidate(OFF, self._time.of(OFF))
        self._lengths: dict[str, list[_Candidate]] = {}
        """The arms of each drafter, by rising draft length."""
        for arm in sorted({*arms} - {OFF}, key=lambda arm: (arm.drafter, arm.num_draft_tokens)):
            candidate = _Candidate(arm, self._time.of(arm))
            self._lengths.setdefault(arm.drafter, []).append(candidate)
        self._acceptance = {
            drafter: Acceptance(lengths[-1].arm.num_draft_tokens, DRAFTERS[drafter].prior)
            for drafter, lengths in self._lengths.items()
        }
        self._current = self._settled = self._off
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

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        """Return every arm that may be chosen."""
        drafting = (one.arm for lengths in self._lengths.values() for one in lengths)
        return frozenset((OFF, *drafting))

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
        expected_s = self._time.expected_s(report.num_decodes, 0, self._off.time)[0]
        elapsed_s = min(elapsed_s, 5 * MAX_RATIO * expected_s)
        bucket = batch_bucket(report.num_decodes)
        spent = self._spent.get(bucket) or self._spent.setdefault(bucket, _Spent())
        spent.busy_s += elapsed_s
        for due in self._spent_due.values():
            due.busy_s += elapsed_s
        if self._trial and self._best_rate > 0:
            decoding_s = elapsed_s - self._time.prefill_s(report.num_prefill_tokens)
            cost_s = max(0.0, decoding_s) - report.num_output_tokens / self._best_rate
            account = self._spent_due[self._current.arm.drafter] if self._trial == "due" else spent
            account.trials_s = max(0.0, account.trials_s + cost_s)
        self._switches = min(3.0, self._switches + elapsed_s * self._caution.switches_per_s)
        self._steps += 1
        self._last_used[drafter] = self._steps

    # --- deciding -----------------------------------------------------------------------------

    def decide(self, context: StepContext) -> Arm:
        """Return the arm that drafts in the next engine step."""
        if context.drafter_version != self._version:
            if self._version is not None:
                for drafter, lengths in self._lengths.items():
                    if lengths[0].arm.uses_model:
                        self._expect_change(drafter)
            self._version = context.drafter_version
        num_decodes = self._num_decodes = context.num_decodes or context.num_prefills
        self._steps_left -= 1
        if num_decodes <= 0 or not self._time.known:
            return self._current.arm
        grown = num_decodes > 2 * self._chosen_for  # a new rollout has started
        if grown:
            self._chosen_for = num_decodes
            for acceptance in self._acceptance.values():
                acceptance.expect_other_text()
        elif self._steps_left > 0:
            return self._current.arm
        if context.num_prefills > context.num_decodes and self._current is self._off:
            return OFF  # no trials while the batch fills up
        tried, in_use = self._current.arm.drafter, self._settled.arm.drafter
        if self._trial and tried not in ("off", in_use):
            known = self._acceptance.get(in_use)
            if self._acceptance[tried].believe_latest(ease=known.ease if known else 1.0):
                self._failed_trials.clear()
        chosen, trial = self._choose(num_decodes)
        if chosen is not self._current and self._switches >= 1:
            self._switches -= 1
            drafter = chosen.arm.drafter
            if drafter not in ("off", tried):
                self._acceptance[drafter].begin()
            self._current = chosen
            self._chosen_for = num_decodes
            self._trial = trial
            if not trial:
                self._settled = chosen
            elif trial == "due":
                self._failed_trials[drafter] = self._failed_trials.get(drafter, 0) + 1
            self._steps_left = self._trial_steps(chosen) if trial else self._caution.dwell_steps
        elif chosen is self._current:
            self._chosen_for = num_decodes
            self._trial = trial
            self._steps_left = 2  # the same arm again: decide in two steps
        return self._current.arm

    def _choose(self, num_decodes: int) -> tuple[_Candidate, Trial | None]:
        """Return the best arm; or an arm that gets a trial, and the reason for the trial."""
        self._estimate(num_decodes)
        best = self._best(num_decodes)
        self._best_rate = best.rate
        worth = 1 + self._caution.margin
        gains = self._optimistic_gains(num_decodes, best)
        promising = sorted([one for one in gains if one[0] >= worth], key=lambda one: -one[0])
        trials: list[tuple[_Candidate, Trial]] = []
        trials += [(one, "due") for one in self._due()]
        trials += [(one, "promising") for _, one in promising]
        for one, trial in trials:
            if one is not best and self._may_try(one, num_decodes, trial):
                return one, trial
        self._failed_trials[best.arm.drafter] = 0
        return best, None

    def _estimate(self, num_decodes: int) -> None:
        """Estimate step times, which do not depend on the text, and rates in recent text.

        The optimistic time of an arm that was never timed at any batch size is at most that of the
        next shorter draft.
        """
        off = self._off
        off.seconds, error, off.visits = self._time.expected_s(num_decodes, 0, off.time)
        off.least_s = off.seconds * (1 - 0.5 * error)
        off.rate = num_decodes / off.seconds
        for drafter, lengths in self._lengths.items():
            gained = self._acceptance[drafter].expected_tokens()
            share, shorter_s = self._acceptance[drafter].drafted_share, off.seconds
            for one in lengths:
                length = one.arm.num_draft_tokens
                one.seconds, error, one.visits = self._time.expected_s(
                    num_decodes, num_decodes * (share * length), one.time
                )
                one.least_s = one.seconds * (1 - 0.5 * error)
                if not one.visits and not one.time.cells:
                    one.least_s = min(one.least_s, shorter_s)
                one.rate = num_decodes * gained[length] / one.seconds
                shorter_s = one.seconds

    def _best(self, num_decodes: int) -> _Candidate:
        """Return the arm with the best expected rate.

        Each drafter enters with its best draft length in recent text. Among these arms, the best
        in all text wins, provided that it beats plain decoding in recent text.
        """
        kept, margin = self._settled, self._caution.margin
        champions = [
            max(tried, key=lambda one: one.rate * (1 + margin * (one is kept)))
            for lengths in self._lengths.values()
            if (tried := [one for one in lengths if one.visits >= 1])
        ]
        if not champions:
            return self._off

        def in_usual_text(one: _Candidate) -> float:
            rate = self._usual_rate(num_decodes, one)
            return rate * (1 + margin * (one.arm.drafter == kept.arm.drafter))

        champion = max(champions, key=in_usual_text) if len(champions) > 1 else champions[0]
        favour = 1 + margin * (1 if kept is self._off else -1)
        return champion if champion.rate >= favour * self._off.rate else self._off

    def _optimistic_gains(
        self, num_decodes: int, best: _Candidate
    ) -> list[tuple[float, _Candidate]]:
        """Return the ratio of each arm's optimistic rate to the best arm's rate.

        Draft positions that the best arm also verifies get no optimism. Optimism about
        acceptance ends once the acceptance of a drafter is known and another drafter is in use:
        only due trials remain. Otherwise optimism would rise wherever text is hard for the drafter
        in use, and such text is hard for all drafters. Optimism about the step time remains until
        the arm was timed at about this batch size: step times do not depend on text.
        """
        gains = []
        for drafter, lengths in self._lengths.items():
            acceptance, rate, known = self._acceptance[drafter], best.rate, False
            if best is self._off or drafter == best.arm.drafter:
                tokens = acceptance.optimistic_tokens(in_use=best.arm.num_draft_tokens)
            else:
                rate = self._usual_rate(num_decodes, best)
                known = acceptance.num_verified >= self._caution.known_drafts
                kind = acceptance.expected_tokens if known else acceptance.optimistic_tokens
                tokens = kind(usual=True)
            for one in lengths:
                gain = num_decodes * tokens[one.arm.num_draft_tokens] / one.least_s / rate
                gains.append((0.0 if known and one.visits >= 1 else gain, one))
        gains.append((num_decodes / self._off.least_s / best.rate, self._off))
        return gains

    def _usual_rate(self, num_decodes: int, one: _Candidate) -> float:
        """Return the tokens per second of a drafting arm in all text."""
        tokens = self._acceptance[one.arm.drafter].expected_tokens(usual=True)
        return num_decodes * tokens[one.arm.num_draft_tokens] / one.seconds

    def _trial_steps(self, one: _Candidate) -> int:
        """Return the number of engine steps of a trial.

        A trial verifies about a dozen drafts. Unless it is the first trial of the arm, it includes
        a step that both verifies and drafts with the arm, for its time.
        """
        steps = min(math.ceil(12 / max(self._num_decodes, 1)), 6)
        known = one is self._off or self._acceptance[one.arm.drafter].seen(one.arm)
        return steps + known

    def _due(self) -> list[_Candidate]:
        """Return the most promising arm of each drafter whose retry interval has passed."""

        def optimistic(one: _Candidate) -> float:
            gained = self._acceptance[one.arm.drafter].optimistic_tokens(usual=True)
            return gained[one.arm.num_draft_tokens] / one.least_s

        due = []
        for drafter, lengths in self._lengths.items():
            # While no drafter is in use, trials stay frequent: the text may have become easy.
            most = 1 if self._settled is self._off else 4
            doublings = min(most, self._failed_trials.get(drafter, 0))
            steps = self._steps - self._last_used.get(drafter, 0)
            if steps > self._caution.retry_interval_steps << doublings:
                acceptance = self._acceptance[drafter]
                num_seen = sum(acceptance.seen(one.arm) for one in lengths)
                due.append(max(lengths[: num_seen + 1], key=optimistic))
        return due

    def _may_try(self, one: _Candidate, num_decodes: int, trial: Trial) -> bool:
        """Return whether the arm may get a trial now.

        Shorter drafts go first: they are cheaper and teach about longer ones. No trial may cost
        more than the rest of its budget.
        """
        drafter = one.arm.drafter
        if one is not self._off:
            lengths = self._lengths[drafter]
            place = lengths.index(one)
            if place and not self._acceptance[drafter].seen(lengths[place - 1].arm):
                return False
        lost = max(0.0, 1 - one.rate / self._best_rate) if self._best_rate > 0 else 0.0
        step_s = self._time.expected_s(num_decodes, 0, one.time)[0]
        cost_s = self._trial_steps(one) * step_s * lost
        share = self._caution.probe_share
        if trial == "due":
            due, none_in_use = self._spent_due[drafter], self._settled is self._off
            return due.trials_s + cost_s <= share * (1 + none_in_use) * due.busy_s
        here = self._spent.get(batch_bucket(num_decodes), _Spent())
        first_s = self._caution.first_probes_steps * self._off.seconds
        return here.trials_s + cost_s <= first_s + share * here.busy_s

    def _expect_change(self, drafter: str) -> None:
        """Try a drafter again soon that has become another one."""
        self._acceptance[drafter].forget(weight=24.0)
        self._steps_left = 0
        self._last_used.pop(drafter, None)
        self._failed_trials.pop(drafter, None)
