"""The policy update of an RL step: complete groups go to the learner, and the policy changes.

A learner with its own devices computes gradients while the rollout's tail still runs. A
colocated learner gets the whole batch after the rollout, in a fixed order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlt.config.train import TrainConfig
from tlt.contracts import Scored
from tlt.learner.batch import TrainSample, Weighting
from tlt.learner.gap import GapAlarm
from tlt.learner.group import LearnerGroup
from tlt.observe.live import Activity, Live
from tlt.observe.stopwatch import Stopwatch
from tlt.spans import Span
from tlt.states.writer import Stored
from tlt.timing.node import update_s
from tlt.timing.pace import Pace
from tlt.train.records import Record, update_record

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport


class PolicyUpdate:
    """One RL step after the other: `begin`, `add` each group, `rollout_ended`, `finish`."""

    def __init__(self, config: TrainConfig, learner: LearnerGroup, live: Live) -> None:
        self._config = config
        self._learner = learner
        self._live = live
        self._weighting = Weighting(config.algorithm.mean_over, config.sampling.max_tokens)
        self.gap = GapAlarm(config.alarm, config.policy.dtype, config.sampling.temperature)
        self._stored = Stored()
        emulated = config.emulate.hardware is not None
        self._pace = Pace(config.emulate.dilation if emulated else 0.0)
        self.version = 0
        """Version of the learner's policy: the number of updates since the run's first step."""
        self.streamed: list[Span] = []
        """Gradient computations of this RL step that ran during its rollout."""

    def go_on_from(self, step: int) -> None:
        """Note that the learner holds the policy of this RL step."""
        self.version = step * self._config.learner.updates_per_step
        self._stored = Stored()

    # --- during the rollout -------------------------------------------------------------------

    def begin(self, step: int) -> None:
        self.streamed = []
        self._complete: asyncio.Queue[list[TrainSample] | None] = asyncio.Queue()
        self._feeding = asyncio.create_task(self._feed(step))

    def add(self, group: list[TrainSample]) -> None:
        """Take the samples of a complete group."""
        if group:
            self._complete.put_nowait(group)

    def rollout_ended(self) -> None:
        """Note that every group was added."""
        self._complete.put_nowait(None)

    def cancel(self) -> None:
        self._feeding.cancel()

    async def _feed(self, step: int) -> list[TrainSample]:
        """Hand samples to a learner with its own devices; return those left for `finish`.

        A sample without an advantage teaches nothing unless the loss has a KL term.
        """
        learner = self._config.learner
        streaming = self._config.placement.kind == "separate" and learner.updates_per_step == 1
        enough = learner.row_tokens * learner.num_ranks
        waiting: list[TrainSample] = []
        while (group := await self._complete.get()) is not None:
            waiting += [s for s in group if s.advantage != 0 or self._config.algorithm.kl_weight]
            if streaming and self._complete.empty() and sum(map(len, waiting)) >= enough:
                started_s = time.monotonic()
                await self._learner.accumulate(waiting, step)
                self.streamed.append(Span("updating", started_s, time.monotonic()))
                waiting = []
        return sorted(waiting, key=lambda s: s.problem_number)  # a group is already in order

    # --- after the rollout --------------------------------------------------------------------

    async def finish(
        self, step: int, scored: Sequence[Scored], watch: Stopwatch, num_faults: int
    ) -> Record:
        """Change the policy and return the update's record.

        `scored` are the samples of all groups that were not discarded. The problems are dealt in
        turn to the RL step's optimizer steps. The loss is a mean over all samples with a reward,
        those without an advantage included.
        `num_faults` is the number of samples that failed their recheck.
        """
        num_updates = self._config.learner.updates_per_step
        self._live.doing(Activity.UPDATING, 0, 1, step)
        watch.skip()
        started_s = time.monotonic()
        waiting = await self._feeding
        reports = []
        max_gap = self.gap.max_gap(num_faults)
        parts: list[list[TrainSample]] = [[] for _ in range(num_updates)]
        lengths: list[list[int]] = [[] for _ in range(num_updates)]
        numbers = sorted({each.problem_number for each in scored})
        part_of = {number: index % num_updates for index, number in enumerate(numbers)}
        for sample in waiting:
            parts[part_of[sample.problem_number]].append(sample)
        for each in scored:
            if each.fault is None:
                lengths[part_of[each.problem_number]].append(each.num_drawn)
        if num_updates > 1:
            for samples in parts:
                await self._learner.remember_logprobs(samples)
        for samples, own_lengths in zip(parts, lengths, strict=True):
            await self._learner.accumulate(samples, step)
            denominator = self._weighting.denominator(own_lengths)
            reports.append(await self._learner.step(denominator, max_gap))
            self.version += 1
            self._live.doing(Activity.UPDATING, len(reports), num_updates, step)
        if num_updates > 1:
            await self._learner.forget_logprobs()
        updates = [report for report, _ in reports]
        await self._wait(time.monotonic() - started_s, updates)
        watch.lap("update")
        alarms = self.gap.check(step, updates, num_faults)
        seconds = watch.seconds["update"] + sum(span.seconds for span in self.streamed)
        row_tokens, kl_weight = self._config.learner.row_tokens, self._config.algorithm.kl_weight
        record = update_record(updates, alarms, seconds, row_tokens, kl_weight)
        if self._config.emulate.hardware is not None:
            record["emulate/update_late_s"], self._pace.late_s = self._pace.late_s, 0.0
        return record | self._capture_record(reports[-1][1])

    async def _wait(self, taken_s: float, updates: Sequence[UpdateReport]) -> None:
        """Let the update take as long as on the emulated GPUs, of which each engine has one."""
        emulate = self._config.emulate
        if emulate.hardware is not None:
            tokens = sum(update.sums.computed_tokens for update in updates)
            seconds = update_s(emulate, self._config.pool.num_engines, tokens)
            await asyncio.sleep(self._pace.left_s(taken_s, seconds))

    def _capture_record(self, stored: Stored) -> Record:
        before, self._stored = self._stored, stored
        if not self._config.capture.enabled:
            return {}
        record: Record = {"capture/bytes": stored.num_bytes}
        if self._config.capture.by != "engines":
            record["capture/samples"] = stored.num_samples - before.num_samples
            record["capture/dropped"] = stored.num_dropped - before.num_dropped
        return record
