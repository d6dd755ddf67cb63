"""Credit, step times and drafter versions, with a scripted strategy and clock."""

from tlt.contracts import OFF, Arm, StepContext, StepReport
from tlt.strategy.controller import DraftController, StepRecord


class Scripted:
    """A strategy that plays a list of arms and records contexts and reports."""

    def __init__(self, arms: list[Arm]) -> None:
        self.script = arms
        self.contexts: list[StepContext] = []
        self.reports: list[StepReport] = []

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        return frozenset(self.script)

    def decide(self, context: StepContext) -> Arm:
        self.contexts.append(context)
        return self.script[context.step]

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def finish(
    controller: DraftController, clock: Clock, drafts: list[tuple[int, int]], tokens: int
) -> StepRecord:
    """Run one engine step of a second."""
    controller.schedule_started()
    record = controller.step_scheduled(2, 0, 0, 0)
    clock.now += 1.0
    controller.step_finished(record, drafts, tokens)
    return record


def test_drafts_are_credited_to_the_step_before() -> None:
    eagle, ngram = Arm("eagle3", 4), Arm("ngram", 2)
    strategy, clock = Scripted([eagle, ngram, OFF]), Clock()
    controller = DraftController(strategy, clock)
    for drafts, tokens in (([], 2), ([(4, 2), (4, 0)], 4), ([(2, 2)], 4)):
        finish(controller, clock, drafts, tokens)
    first, second, third = strategy.reports
    assert (first.verified, first.proposed, first.num_drafts) == (OFF, eagle, 0)
    assert (second.verified, second.proposed) == (eagle, ngram)
    assert (second.num_draft_tokens, second.num_accepted_tokens) == (8, 2)
    assert second.accepted_at == (1, 1)
    assert (third.verified, third.accepted_at) == (ngram, (1, 1))
    assert controller.totals.output_tokens == 2 + 4 + 4
    assert controller.totals.drafts == 3


def test_a_recheck_drafts_nothing_and_is_not_counted() -> None:
    eagle = Arm("eagle3", 4)
    strategy, clock = Scripted([eagle, eagle]), Clock()
    controller = DraftController(strategy, clock)
    for uncounted in (False, True, True, False):
        controller.uncounted = uncounted
        record = finish(controller, clock, [], 1)
        assert record.proposed == (OFF if uncounted else eagle)
    assert [context.step for context in strategy.contexts] == [0, 1]
    assert [report.verified for report in strategy.reports] == [OFF, eagle]
    assert (controller.totals.steps, controller.totals.output_tokens) == (2, 2)
    assert controller.totals.busy_s == 2.0
    assert len(controller.take_trace()) == 2
    assert sum(span.seconds for span in controller.spans.take()) == 2.0


def test_a_step_queued_when_the_last_sample_ends_is_not_counted() -> None:
    """With asynchronous scheduling it ends in the next rollout, and idle time is no step's."""
    strategy, clock = Scripted([OFF, OFF, OFF]), Clock()
    controller = DraftController(strategy, clock)
    controller.schedule_started()
    last = controller.step_scheduled(1, 0, 0, 0)
    controller.schedule_started()
    queued = controller.step_scheduled(1, 0, 0, 0)
    clock.now = 1.0
    controller.step_finished(last, [], 2)
    controller.went_idle()
    clock.now = 100.0
    controller.schedule_started()
    first = controller.step_scheduled(1, 0, 0, 0)
    controller.step_finished(queued, [], 0)
    clock.now = 101.0
    controller.step_finished(first, [], 1)
    assert [report.elapsed_s for report in strategy.reports] == [1.0, 1.0]
    assert (controller.totals.steps, controller.totals.busy_s) == (2, 2.0)
    assert sum(span.seconds for span in controller.spans.take()) == 2.0


def test_overlapping_steps_share_no_time() -> None:
    """Asynchronous scheduling: step 1 is scheduled while step 0 runs."""
    strategy, clock = Scripted([OFF, OFF]), Clock()
    controller = DraftController(strategy, clock)
    controller.schedule_started()
    first = controller.step_scheduled(1, 0, 0, 0)
    clock.now = 1.0
    controller.schedule_started()
    second = controller.step_scheduled(1, 0, 0, 0)
    clock.now = 3.0
    controller.step_finished(first, [], 1)
    clock.now = 5.0
    controller.step_finished(second, [], 1)
    assert [report.elapsed_s for report in strategy.reports] == [3.0, 2.0]
    assert controller.totals.busy_s == 5.0


def test_a_new_drafter_version_reaches_the_strategy() -> None:
    strategy = Scripted([OFF, OFF])
    controller = DraftController(strategy, Clock())
    controller.step_scheduled(1, 0, 0, 0)
    controller.drafter_version = 7
    record = controller.step_scheduled(1, 2, 3, 40)
    assert strategy.contexts[1].drafter_version == 7
    assert controller.step_finished(record, [], 1).drafter_version == 7
