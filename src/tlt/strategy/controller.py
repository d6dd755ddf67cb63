"""Runs a strategy step by step: asks for arms, and reports acceptances and step times.

The scheduler calls `schedule_started`, `step_scheduled` and `step_finished`. The rest is here,
without vLLM, and tests run it with a fake clock. Credit is the delicate part: the arm of step t
proposed the drafts that step t+1 verifies. Under asynchronous scheduling, step t+1 is scheduled
before step t has finished, so each step carries its own record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from tlt.contracts import OFF, Arm, StepContext, StepReport, Strategy
from tlt.spans import Span, SpanLog

TRACE_STEPS = 20_000
"""Engine steps that the trace holds: some megabytes."""


@dataclass(slots=True)
class StepRecord:
    """Facts about an engine step that was scheduled and has not finished."""

    context: StepContext
    verified: Arm
    proposed: Arm
    num_prefill_tokens: int
    started_s: float
    counts: bool
    """False for rechecks: neither counters nor the strategy see the engine step."""


@dataclass(slots=True)
class Totals:
    """Counters since the engine started."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_drafts: int = 0
    model_accepted_tokens: int = 0
    model_first_accepted: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Count a finished engine step."""
        self.steps += 1
        self.drafts += report.num_drafts
        self.draft_tokens += report.num_draft_tokens
        self.accepted_tokens += report.num_accepted_tokens
        if report.verified.uses_model:
            self.model_drafts += report.num_drafts
            self.model_accepted_tokens += report.num_accepted_tokens
            self.model_first_accepted += sum(report.accepted_at[:1])
        self.output_tokens += report.num_output_tokens
        self.busy_s += report.elapsed_s
        num = len(report.accepted_at)
        self.accepted_at.extend([0] * (num - len(self.accepted_at)))
        self.accepted_at[:num] = map(add, self.accepted_at, report.accepted_at)


class DraftController:
    """Asks the strategy for an arm per step and reports back to it."""

    def __init__(self, strategy: Strategy, clock: Callable[[], float]) -> None:
        self._strategy = strategy
        self._clock = clock
        self._last_arm = OFF
        self._step = 0
        self._schedule_started_s = 0.0
        self._last_finished_s = 0.0
        self._first_live_step = 0
        """First engine step that serves requests which have not ended."""
        self.drafter_version = 0
        self.uncounted = False
        """Whether the engine generates no samples, but a recheck (`tlt.rollout.recheck`): it drafts
        nothing, and counts nothing."""
        self.totals = Totals()
        self._trace: deque[StepReport] = deque(maxlen=TRACE_STEPS)
        self.spans = SpanLog()
        """Spans of the engine's work, by this clock."""

    def set_strategy(self, strategy: Strategy) -> None:
        """Use another strategy from the next engine step on."""
        self._strategy = strategy

    def now_s(self) -> float:
        """Return the clock's time."""
        return self._clock()

    def take_trace(self) -> list[StepReport]:
        """Return the steps since the last call, at most the latest `TRACE_STEPS`."""
        trace = list(self._trace)
        self._trace.clear()
        return trace

    def schedule_started(self) -> None:
        """Note when the scheduler began with the next engine step."""
        self._schedule_started_s = self._clock()

    def step_scheduled(
        self, num_decodes: int, num_prefills: int, num_waiting: int, num_prefill_tokens: int
    ) -> StepRecord:
        """Choose the arm of an engine step that is about to run."""
        context = StepContext(
            step=self._step,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_waiting=num_waiting,
            drafter_version=self.drafter_version,
        )
        verified = proposed = OFF
        if not self.uncounted:
            self._step += 1
            verified, proposed = self._last_arm, self._strategy.decide(context)
            self._last_arm = proposed
        return StepRecord(
            context,
            verified,
            proposed,
            num_prefill_tokens,
            started_s=self._schedule_started_s,
            counts=not self.uncounted,
        )

    def went_idle(self) -> None:
        """Count no engine step that is under way: the requests that it serves have ended.

        Asynchronous scheduling leaves one behind, which ends when the next requests come.
        """
        self._first_live_step = self._step

    def started_s(self, record: StepRecord) -> float:
        """Return when an engine step began: not before the last one ended."""
        return max(record.started_s, self._last_finished_s)

    def step_finished(
        self, record: StepRecord, drafts: Sequence[tuple[int, int]], num_output_tokens: int
    ) -> StepReport:
        """Report a finished engine step to the strategy.

        `drafts` holds (drafted tokens, accepted tokens) of each request with a draft.
        """
        now, started_s = self.now_s(), self.started_s(record)
        self._last_finished_s = now
        num_draft_tokens, longest, ends = 0, 0, [0]
        for num_drafted, num_accepted in drafts:
            num_draft_tokens += num_drafted
            if num_accepted > longest:
                ends += [0] * (num_accepted - longest)
                longest = num_accepted
            ends[num_accepted] += 1
        accepted_at = tuple(accumulate(reversed(ends)))[-2::-1]
        report = StepReport(
            step=record.context.step,
            verified=record.verified,
            proposed=record.proposed,
            num_decodes=record.context.num_decodes,
            num_prefill_tokens=record.num_prefill_tokens,
            num_drafts=len(drafts),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=sum(accepted_at),
            accepted_at=accepted_at,
            num_output_tokens=num_output_tokens,
            elapsed_s=now - started_s,
            drafter_version=record.context.drafter_version,
            ended_s=now,
        )
        if not record.counts or record.context.step < self._first_live_step:
            return report
        self._trace.append(report)
        self.spans.add(
            Span(
                "generating",
                started_s,
                now,
                running=float(record.context.num_decodes + record.context.num_prefills),
                arm=str(record.verified),
                tokens=num_output_tokens,
                drafts=len(drafts),
                accepted=report.num_accepted_tokens,
            )
        )
        self.totals.add(report)
        self._strategy.observe(report)
        return report
