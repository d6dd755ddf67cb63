"""`tlt train`: the RL loop, from prompts to a better policy.

`Training._step` is the list of what happens in an RL step. The step is synchronous and on-policy:
all its samples come from the policy that the step began with. `rollouts`, `update`, `records` and
`checkpoints` do the work.

While the last samples are generated, idle workers train the drafter (`tlt.harvest`). The run gets
their devices back before it updates the policy.

No RL step is lost or done twice, whichever process dies. The pools replace engines and reward
workers. After the loss of a learner rank, the loop goes back to the last checkpoint; a resumed run
starts there. All randomness is a function of the seed and the RL step, so the step is the data
position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.agents.host import ToolHost
from tlt.config.train import TrainConfig
from tlt.contracts import Scored
from tlt.errors import LearnerLost
from tlt.harvest.contract import RunHarvest
from tlt.learner.advantage import advantage_function
from tlt.learner.batch import Groups
from tlt.learner.group import LearnerGroup
from tlt.observe.health import HealthWatch
from tlt.observe.live import Activity
from tlt.observe.record import read
from tlt.observe.stopwatch import Stopwatch
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Rechecks
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardPool
from tlt.train.checkpoints import Checkpoints
from tlt.train.folder import RunFolder
from tlt.train.gate import Gate
from tlt.train.preflight import Prepared
from tlt.train.records import (
    PoolCounters,
    Record,
    RunLog,
    eval_record,
    replacement_record,
    rollout_record,
    turns_record,
)
from tlt.train.rollouts import Rollouts
from tlt.train.signals import Termination, finish_or_abandon
from tlt.train.sync import HostSync
from tlt.train.update import PolicyUpdate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Components:
    """The running parts that `launch` starts and stops, and the training loop drives."""

    pool: RolloutPool
    learner: LearnerGroup
    rewards: RewardPool
    tools: ToolHost | None
    harvest: RunHarvest
    rechecks: Rechecks
    weights: HostSync


class Training:
    """One run, on parts that are running."""

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        folder: RunFolder,
        parts: Components,
        log: RunLog,
        term: Termination,
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._folder = folder
        self._parts = parts
        self._log = log
        self._term = term
        self._stop = asyncio.Event()
        """Set when a signal asks the run to end."""
        self._updating = False
        """Whether the policy update of the RL step has begun."""
        pool, learner, harvest = parts.pool, parts.learner, parts.harvest
        self._rollouts = Rollouts(
            *(config, prepared.chat, pool, parts.rewards, harvest, log.live),
            max_prompt_tokens=prepared.max_prompt_tokens,
            tools=parts.tools,
            tool_schemas=prepared.tool_schemas,
        )
        self._update = PolicyUpdate(config, learner, log.live)
        self._counters = PoolCounters(pool)
        self._checkpoints = Checkpoints(config, folder, learner, harvest)
        self._gate = Gate(config.debug.gate)
        self._health = HealthWatch(config.alarm.max_lost_steps, config.learner.updates_per_step)
        self._learner_restarts = 0
        """Restarts since the last record."""

    async def run(self, resume: bool) -> None:
        """Take all RL steps that are not done yet; the learner holds the last checkpoint."""
        with self._term.calling(self._stop.set):
            await self._run(resume)
        self._log.close()

    async def _run(self, resume: bool) -> None:
        done, num_steps = 0, self._config.run.num_steps
        if resume:
            _, done = self._checkpoints.last()
            records = read(self._folder.metrics)
            self._update.gap.recall(r for r in records if r["step"] <= done)
            try:
                await self._go_on_from(done)
            except LearnerLost as error:
                done = await self._revive_learner(error)
        self._log.rewind(done if done else -1)
        if done == 0 and self._config.eval.every_steps:
            watch = Stopwatch()
            record = await self._evaluate(0, watch)
            await self._log.step(0, record, watch)
        while done < num_steps:
            try:
                step = self._step(done + 1)
                done += await finish_or_abandon(step, self._stop, lambda: not self._updating)
                if self._stop.is_set():
                    await self._end_early(done)
                if done == num_steps:
                    await self._checkpoints.finish()
            except LearnerLost as error:
                if self._stop.is_set():  # the signal may have ended the ranks as well
                    await self._checkpoints.abandon()
                    self._leave()
                done = await self._revive_learner(error)
            except BaseException:
                await self._checkpoints.finish_in_time()
                raise
        await finish_or_abandon(self._gate.wait_for_turn(num_steps + 1), self._stop, lambda: True)
        self._gate.close()

    async def _end_early(self, done: int) -> None:
        """Finish the checkpoint under way, or write one of RL step `done`, and raise."""
        if self._config.run.checkpoint_on_term:
            try:
                await self._checkpoints.write_now(done)
            except Exception as error:  # a scheduler may have ended the ranks as well
                logger.error("no checkpoint of RL step %d could be written: %r", done, error)
        else:
            await self._checkpoints.finish_in_time()
        self._leave(f" after RL step {done}")

    def _leave(self, when: str = "") -> None:
        """End the run because of a signal."""
        _, saved = self._checkpoints.last()
        self._log.close()
        self._term.raise_if_requested(f"{when}; `--resume` continues after RL step {saved}")

    # --- one RL step --------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        self._updating = False
        await self._gate.wait_for_turn(step)
        watch = Stopwatch()
        await self._counters.step_started()
        problems = await asyncio.to_thread(self._problems, step)
        self._update.begin(step)
        try:
            scored, kept, record = await self._rollout(step, problems, watch)
            self._updating = True
            await self._parts.weights.engines_sleep()
            self._parts.harvest.update_started()
            num_faults = self._parts.rechecks.num_faults
            record |= await self._update.finish(step, kept, watch, num_faults)
        except BaseException:
            self._update.cancel()
            raise
        await self._sync()
        watch.lap("sync")
        record["policy_version"] = self._update.version
        await self._checkpoints.begin(step, watch)
        every = self._config.eval.every_steps
        if every and (step % every == 0 or step == self._config.run.num_steps):
            record |= await self._evaluate(step, watch)
        record |= self._counters.step_ended() | self._parts.rechecks.record()
        record["learner/restarts"], self._learner_restarts = self._learner_restarts, 0
        record["checkpoint/faults"] = self._checkpoints.take_faults()
        if self._parts.tools is not None:
            self._parts.tools.forget(self._checkpoints.oldest())
        self._log.samples(step, problems, scored)
        await self._log.step(step, record, watch, self._update.streamed)
        self._checkpoints.end(step)
        self._health.observe({"step": step, **record})

    def _problems(self, step: int) -> list[Problem]:
        """Return the problems of an RL step, and then the extra ones for dynamic sampling."""
        source, sampling = self._prepared.source, self._config.sampling
        count = sampling.prompts_per_step
        return source.batch(step, count) + source.extra(step, count, sampling.max_extra_prompts)

    async def _rollout(
        self, step: int, problems: Sequence[Problem], watch: Stopwatch
    ) -> tuple[list[Scored], list[Scored], Record]:
        """Generate and score the samples of an RL step; complete groups go to the update.

        Return all samples, and the samples of groups that were not discarded.
        """
        config, sampling = self._config, self._config.sampling
        replaces = sampling.max_extra_prompts > 0
        groups = Groups(
            sampling.group_size,
            advantage_function(config.algorithm.advantage),
            over_step=config.algorithm.advantage_over == "step",
            only_signal=replaces,
        )

        def take(scored: Scored) -> bool:
            self._update.add(groups.add(scored))
            return scored.problem_number in groups.discarded

        watch.skip()
        self._parts.rechecks.step_started()
        scored = await self._rollouts.generate(
            *(step, problems, self._update.version, watch), on_scored=take
        )
        for group in groups.rest():
            self._update.add(group)
        work = await self._counters.rollout_ended()
        self._update.rollout_ended()
        engines_capture = config.capture.by == "engines"
        record = rollout_record(
            *(scored, groups, work, watch.seconds["rollout"], engines_capture),
            emulated=config.emulate.hardware is not None,
        )
        record["prompt/left_out"] = self._rollouts.num_left_out
        if self._parts.tools is not None:
            record |= turns_record(scored)
        if replaces:
            record |= replacement_record(scored, groups, sampling.prompts_per_step)
        during = work.during
        self._parts.harvest.alarm(during.model_drafts, during.model_accepted_tokens)
        kept = [s for s in scored if s.problem_number not in groups.discarded]
        return scored, kept, record | self._parts.harvest.record()

    async def _evaluate(self, step: int, watch: Stopwatch) -> Record:
        """Return the record of the held-out sets under the current policy."""
        watch.skip()
        record: Record = {}
        for each in self._prepared.held_out:
            scored = await self._rollouts.evaluate(step, each, self._update.version, watch)
            record |= eval_record(scored, each.name)
        return record

    async def _sync(self) -> None:
        """Load the learner's policy into all engines."""
        await self._parts.harvest.update_ended()
        weights = await self._parts.weights.sync(self._update.version)
        logger.info("all engines have policy %d", self._update.version)
        self._parts.harvest.policy_changed(weights, self._update.version)

    # --- continuing after a loss --------------------------------------------------------------

    async def _go_on_from(self, done: int) -> None:
        """Give the engines the policy of the learner, which holds RL step `done`."""
        self._update.go_on_from(done)
        await self._sync()

    async def _revive_learner(self, error: LearnerLost) -> int:
        """Start the ranks again from the last checkpoint; return the RL step that it holds."""
        self._learner_restarts += 1
        self._checkpoints.restarts_since += 1
        if self._checkpoints.restarts_since > self._config.learner.max_restarts:
            raise error
        logger.warning("%s; starting the ranks again from the last checkpoint", error)
        self._log.live.doing(Activity.RESTARTING_LEARNER, 0, 1)
        await self._parts.learner.stop()
        await self._checkpoints.abandon()
        checkpoint, done = await asyncio.to_thread(self._checkpoints.last, verify_again=True)
        await self._parts.weights.engines_sleep()
        try:
            await self._parts.learner.start(checkpoint)
            await self._go_on_from(done)
        except LearnerLost as again:
            return await self._revive_learner(again)
        self._log.rewind(done)
        return done
