"""The adaptive strategy: predict the tokens per second of every arm, and use the best one.

    tokens per second = decodes x tokens gained per request / seconds of the step

Both halves are learned while the engine works (`estimates`). Acceptance is shared by all draft
lengths of a drafter and step times by all batch sizes, so that few arms ever need to be tried.
Four rules keep it calm and safe:

- **Hysteresis and dwell.** It changes the arm only for a gain of more than `margin`, keeps it for
  some steps, and changes at most `switches_per_s` times a second.
- **Probes have a budget.** An arm that might be better is tried for a few steps, but the time lost
  to such trials stays below `probe_share` of the engine's time, and as much for looks at each
  drafter that is not in use, twice as much while none is. That bounds what a bad drafter can cost,
  whatever the model believes.
- **Like is compared with like.** Text turns from easy to hard within a response, for all drafters
  alike. The draft length follows the text of the moment; drafters are compared over all text.
- **News is looked at.** A new version of the drafter is soon judged by its own drafts. A drafter
  that is not in use is looked at from time to time, more and more rarely while it is no better and
  nothing changes. Drafts that do not fit what is remembered replace it.

There is no clock but the seconds that steps report and no random choice: the same reports give the
same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from tlt.contracts import OFF, Arm, StepContext, StepReport
from tlt.strategy.estimates import MAX_RATIO, Acceptance, StepTime, batch_bucket

Times = Mapping[Arm, tuple[float, float]]
"""Of every arm: seconds of a step, expected and at best."""
Trial = Literal["look", "hope"]
"""Why an arm is tried: nobody looked at its drafter for long, or it might be the fastest."""
PRIOR = {"eagle3": 0.7, "ngram": 0.3}
"""Chance that a draft token is accepted, before anything is known: a draft model was trained for
this, n-grams stand in for one."""


@dataclass(frozen=True, slots=True)
class Caution:
    """How readily the strategy changes its mind."""

    margin: float = 0.03
    """Relative gain that is worth a change of arm."""
    dwell_steps: int = 4
    """Steps an arm is kept: the drafts of one step are verified in the next."""
    switches_per_s: float = 10.0
    probe_share: float = 0.005
    """Share of the engine's time that trying arms may cost."""
    first_probes_steps: float = 4.0
    """What trying may cost at a batch size that is new, or after a new drafter, in plain steps."""
    look_every_steps: int = 64
    """Steps after which an unused drafter is looked at again, if the budget allows. Each look in
    vain doubles them, up to 16 times as many beside another drafter and twice as many beside none,
    until acceptance changes."""
    known_drafts: int = 50
    """Verified drafts after which a drafter is tried by such looks alone, beside another one."""


@dataclass(slots=True)
class _Spent:
    """Seconds of the engine at about one batch size, and how many of them trials have cost."""

    busy_s: float = 0.0
    probes_s: float = 0.0


class Adaptive:
    """Chooses the arm with the best predicted throughput; see the module."""

    def __init__(self, arms: Collection[Arm], caution: Caution | None = None) -> None:
        self._caution = caution or Caution()
        self._arms = sorted({*arms, OFF}, key=lambda arm: (arm.drafter, arm.num_draft_tokens))
        self._lengths: dict[str, list[Arm]] = {}
        """The arms of each drafter, by rising draft length."""
        for arm in self._arms:
            if arm != OFF:
                self._lengths.setdefault(arm.drafter, []).append(arm)
        self._acceptance = {
            drafter: Acceptance(arms[-1].num_draft_tokens, PRIOR[drafter])
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
        self._looks = {drafter: _Spent() for drafter in self._lengths}
        """At drafters that are not in use; each has its own budget, so that none is starved by one
        that is no good."""
        self._switches = 3.0
        self._best_rate = 0.0
        self._version: int | None = None
        self._steps = 0
        self._looked_at: dict[str, int] = {}
        self._vain_looks: dict[str, int] = {}

    def arms(self) -> frozenset[Arm]:
        return frozenset(self._arms)

    # --- what happened ------------------------------------------------------------------------

    def observe(self, report: StepReport) -> None:
        elapsed_s = report.elapsed_s
        if not (math.isfinite(elapsed_s) and elapsed_s > 0):
            elapsed_s = 0.0
        drafter = report.verified.drafter
        if drafter in self._acceptance and report.drafter_version == self._version:
            turned = self._acceptance[drafter].observe(report)
            if turned:
                self._vain_looks.clear()  # other drafters may do better now, too
        # A step that starts an EAGLE-3 drafter also gives it what it has missed.
        if report.proposed.drafter in ("off", report.verified.drafter):
            self._time.observe(report, steady=report.verified == report.proposed)
        expected_s = self._time.expected_s(report.num_decodes, 0, OFF)[0]
        elapsed_s = min(elapsed_s, 5 * MAX_RATIO * expected_s)
        spent = self._spent.setdefault(batch_bucket(report.num_decodes), _Spent())
        spent.busy_s += elapsed_s
        for looks in self._looks.values():
            looks.busy_s += elapsed_s
        if self._trial and self._best_rate > 0:
            decoding_s = elapsed_s - self._time.prefill_s(report.num_prefill_tokens)
            cost_s = max(0.0, decoding_s) - report.num_output_tokens / self._best_rate
            account = self._looks[self._current.drafter] if self._trial == "look" else spent
            account.probes_s = max(0.0, account.probes_s + cost_s)
        self._switches = min(3.0, self._switches + elapsed_s * self._caution.switches_per_s)
        self._steps += 1
        self._looked_at[drafter] = self._steps

    # --- what to do ---------------------------------------------------------------------------

    def decide(self, context: StepContext) -> Arm:
        if context.drafter_version != self._version:
            self._meet_new_drafter(context.drafter_version)
        num_decodes = self._num_decodes = context.num_decodes or context.num_prefills
        self._steps_left -= 1
        if num_decodes <= 0 or not self._time.known:
            return self._current
        grown = num_decodes > 2 * self._chosen_for  # a new rollout: what was right no longer is
        if grown:
            self._chosen_for = num_decodes
            for acceptance in self._acceptance.values():
                acceptance.expect_other_text()
        elif self._steps_left > 0:
            return self._current
        if context.num_prefills > context.num_decodes and self._current == OFF:
            return OFF  # the batch is still filling up: no time to try things
        if self._trial and self._current.drafter not in ("off", self._settled.drafter):
            in_use = self._acceptance.get(self._settled.drafter)
            tried = self._acceptance[self._current.drafter]
            if tried.believe_latest(ease=in_use.ease if in_use else 1.0):
                self._vain_looks.clear()
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
            elif trial == "look":
                self._vain_looks[arm.drafter] = self._vain_looks.get(arm.drafter, 0) + 1
            self._steps_left = self._trial_steps(arm) if trial else self._caution.dwell_steps
        elif arm == self._current:
            self._chosen_for = num_decodes
            self._trial = trial
            self._steps_left = 2  # no need to think at every step
        return self._current

    def _choose(self, num_decodes: int) -> tuple[Arm, Trial | None]:
        """The best arm; or one that might be better and may be tried, and why it is."""
        times = self._times(num_decodes)
        rates = {arm: self._rate(num_decodes, arm, times) for arm in self._arms}
        best = self._best(num_decodes, {arm: rate for arm, (rate, _) in rates.items()}, times)
        self._best_rate = rates[best][0]
        hopes = {
            arm: self._hope(num_decodes, arm, best, times)
            for arm in self._arms
            if arm.drafter != "off"
        }
        hopes[OFF] = rates[OFF][1] / self._best_rate
        worth = 1 + self._caution.margin
        hopeful = sorted((a for a in hopes if hopes[a] >= worth), key=lambda a: -hopes[a])
        trials: list[tuple[Arm, Trial]] = []
        trials += [(arm, "look") for arm in self._overlooked(num_decodes, times)]
        trials += [(arm, "hope") for arm in hopeful]
        for arm, trial in trials:
            if arm != best and self._may_be_tried(arm, num_decodes, rates[arm][0], trial):
                return arm, trial
        self._vain_looks[best.drafter] = 0
        return best, None

    def _best(self, num_decodes: int, rates: dict[Arm, float], times: Times) -> Arm:
        """Of every drafter the length that suits the text of the moment; of these the best in usual
        text; and that one only if, at the moment, it is better than none."""
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

    def _hope(self, num_decodes: int, arm: Arm, best: Arm, times: Times) -> float:
        """How many times as fast as the best arm a draft might be.

        Once the acceptance of a drafter is known, it is not tried in the hope of more acceptance
        beside another drafter, but looked at from time to time: hopes rise where the text is hard
        for the drafter in use, and such text is hard for all. Hopes for a shorter step remain until
        the arm was timed at about this batch size: step times do not depend on the text.
        """
        if best != OFF and arm.drafter != best.drafter:
            expected, hoped = self._rate(num_decodes, arm, times, usual=True)
            if self._acceptance[arm.drafter].num_verified >= self._caution.known_drafts:
                seconds, least_s = times[arm]
                timed = self._time.visits(num_decodes, arm) >= 1
                hoped = 0.0 if timed else expected * seconds / least_s
            return hoped / self._rate(num_decodes, best, times, usual=True)[0]
        return self._rate(num_decodes, arm, times, in_use=best)[1] / self._best_rate

    def _trial_steps(self, arm: Arm) -> int:
        """Long enough to verify a dozen drafts, and, unless it is the first look at all, for
        a step that both verifies and drafts, to be timed."""
        steps = min(math.ceil(12 / max(self._num_decodes, 1)), 6)
        first_look = arm != OFF and not self._acceptance[arm.drafter].seen(arm)
        return steps if first_look else steps + 1

    def _overlooked(self, num_decodes: int, times: Times) -> list[Arm]:
        """Of each drafter that was not looked at for long, the length that might be best here. The
        drafter, or the text, may have changed."""

        def hoped(arm: Arm) -> float:
            return self._rate(num_decodes, arm, times, usual=True)[1]

        overlooked = []
        for drafter, lengths in self._lengths.items():
            # With none in use, text that has become easy is worth looking for.
            in_vain = min(4 if self._settled != OFF else 1, self._vain_looks.get(drafter, 0))
            steps = self._steps - self._looked_at.get(drafter, 0)
            if steps > self._caution.look_every_steps << in_vain:
                num_seen = sum(self._acceptance[drafter].seen(arm) for arm in lengths)
                overlooked.append(max(lengths[: num_seen + 1], key=hoped))
        return overlooked

    def _may_be_tried(self, arm: Arm, num_decodes: int, rate: float, trial: Trial) -> bool:
        """Shorter drafts go first, they are cheaper and tell about the longer ones; and no trial
        may cost more than is left of the budget."""
        if arm.num_draft_tokens:
            lengths = self._lengths[arm.drafter]
            place = lengths.index(arm)
            if place and not self._acceptance[arm.drafter].seen(lengths[place - 1]):
                return False
        lost = max(0.0, 1 - rate / self._best_rate) if self._best_rate > 0 else 0.0
        step_s = self._time.expected_s(num_decodes, 0, arm)[0]
        cost_s = self._trial_steps(arm) * step_s * lost
        share = self._caution.probe_share
        if trial == "look":
            looks = self._looks[arm.drafter]
            return looks.probes_s + cost_s <= share * (1 + (self._settled == OFF)) * looks.busy_s
        here = self._spent.get(batch_bucket(num_decodes), _Spent())
        first_s = self._caution.first_probes_steps * self._time.expected_s(num_decodes, 0, OFF)[0]
        return here.probes_s + cost_s <= first_s + share * here.busy_s

    def _times(self, num_decodes: int) -> Times:
        """The dear half of all rates, and the same in whatever text. Of an arm that was never timed
        at any batch size, one may hope that it takes no longer than the next shorter draft."""
        seconds, error = self._time.expected_s(num_decodes, 0, OFF)
        times = {OFF: (seconds, seconds * (1 - 0.5 * error))}
        for drafter, lengths in self._lengths.items():
            shorter_s = times[OFF][0]
            for arm in lengths:
                share = self._acceptance[drafter].drafted_share
                draft_tokens = num_decodes * arm.num_draft_tokens * share
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
        """Tokens per second of an arm, in the text of the moment or in all text: expected, and the
        most that may be hoped for, beside the arm in use."""
        gained = hoped = 1.0
        if arm.num_draft_tokens:
            acceptance = self._acceptance[arm.drafter]
            gained, hoped = (
                acceptance.usual_tokens(arm.num_draft_tokens)
                if usual
                else acceptance.recent_tokens(arm.num_draft_tokens, in_use.num_draft_tokens)
            )
        seconds, least_s = times[arm]
        return num_decodes * gained / seconds, num_decodes * hoped / least_s

    def _meet_new_drafter(self, version: int) -> None:
        if self._version is not None and "eagle3" in self._acceptance:
            self._acceptance["eagle3"].forget(weight=24.0)
            self._steps_left = 0
            self._looked_at.pop("eagle3", None)
            self._vain_looks.pop("eagle3", None)
        self._version = version
