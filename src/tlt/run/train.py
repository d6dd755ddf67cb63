"""`tlt train`: the RL loop, from prompts to a better policy.

A step, in order: problems become requests; the pool generates them and every sample is scored as
it ends; a group that is complete gets its advantages and goes to the learner; the learner changes
the policy; the engines get its weights. The step is synchronous and on-policy: no sample of a step
comes from another policy than the one the step began with.

While the last samples are generated, engines that are done train the drafter (`run/harvest.py`);
their devices are back before the policy is updated.

What waits for what: scoring runs beside generation. With devices of its own the learner computes
gradients while the tail still runs; colocated, it gets the whole batch at once, in a fixed order.
Checkpoints are written beside the next step.

Whatever dies, no step is lost or done twice: engines and reward workers are replaced by their
pools; a lost learner rank puts the loop back to the last checkpoint; a killed driver does the same
when resumed. All randomness is a function of the seed and the step, so the step is the data
position.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt.config.train import TrainConfig
from tlt.contracts import EngineStats, Sample, SampleRequest, SamplingSpec, ShowProgress
from tlt.errors import EngineError, LearnerLost
from tlt.harvest.session import NoHarvest
from tlt.learner.advantage import ADVANTAGES
from tlt.learner.batch import Groups, ScoredSample, TrainSample, Weighting
from tlt.learner.gap import MAX_IN_A_ROW, GapWatch
from tlt.learner.group import LearnerGroup
from tlt.node.weights import remove_abandoned
from tlt.observe.record import MetricsLog, StepLog, read
from tlt.observe.sinks import Sinks
from tlt.observe.stopwatch import Stopwatch
from tlt.rollout.pool import RolloutPool
from tlt.run.folder import RunFolder
from tlt.run.preflight import Prepared
from tlt.run.timekeeper import NoTimekeeper, Timekeeper
from tlt.spans import Span
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import Reward, RewardPool
from tlt.tasks.tail import HeavyTail, length_summary

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport

logger = logging.getLogger(__name__)

Record = dict[str, float]
CHECKPOINT_GRACE_S = 60.0
"""How long a run that must end waits for a checkpoint that is being written."""


@dataclass(slots=True)
class Scored:
    """A sample with everything that is known about it."""

    problem: Problem
    request: SampleRequest
    sample: Sample
    text: str
    reward: Reward


class Training:
    """One run. Engines, learner and reward workers are handed in running."""

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        folder: RunFolder,
        pool: RolloutPool,
        learner: LearnerGroup,
        rewards: RewardPool,
        sinks: Sinks,
        harvest: NoHarvest,
        times: Timekeeper | NoTimekeeper,
        show: ShowProgress,
        on_record: Callable[[Record], None],
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._folder = folder
        self._pool = pool
        self._learner = learner
        self._rewards = rewards
        self._sinks = sinks
        self._harvest = harvest
        self._times = times
        self._show = show
        self._on_record = on_record
        self._log = MetricsLog(folder.metrics)
        self._lengths = StepLog(folder.lengths)
        self._weighting = Weighting(config.algorithm.mean_over, config.sampling.max_tokens)
        self._gap = GapWatch(
            config.alarm.gap_factor, config.policy.dtype, config.sampling.temperature
        )
        self._tainted = 0
        """Engines that were replaced for it until the last rollout."""
        self._last_stats: Sequence[EngineStats] = ()
        """Counters of all engines at the end of the last rollout."""
        self._version = 0
        self._captured = 0
        self._learner_restarts = 0
        self._failures = 0
        """Restarts of the learner since the last checkpoint: what fails every time must end."""
        self._streamed: list[Span] = []
        """Updates that were computed while the rollout went on."""
        self._checkpoint: asyncio.Task[None] | None = None

    async def run(self, resume: bool) -> None:
        """Take all steps that are not done yet; the learner is where the last checkpoint is."""
        done = 0
        if resume:
            _, done = self._folder.last_checkpoint()
            for record in read(self._folder.metrics):
                gap = record.get("learner/gap_mean", 0.0)
                if record["step"] <= done and gap and not record.get("learner/gap_alarms"):
                    self._gap.observe(gap)
            await self._go_on_from(done)
        self._rewind(done if done else -1)
        if done == 0 and self._config.eval.every_steps:
            watch = Stopwatch()
            record = await self._evaluate(0, watch)
            await self._times.step_ended(0, watch, [])
            self._append({"step": 0, **record, **watch.record()})
        while done < self._config.run.num_steps:
            try:
                await self._step(done + 1)
                done += 1
                if done == self._config.run.num_steps:
                    await self._finish_checkpoint()
            except LearnerLost as error:
                done = await self._revive_learner(error)
            except BaseException:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(CHECKPOINT_GRACE_S):
                        await self._finish_checkpoint()
                raise
        self._log.close()
        self._lengths.close()

    def _rewind(self, step: int) -> None:
        """Forget what was recorded after this step: it is done again."""
        for log in (self._log, self._lengths, self._times):
            log.rewind(step)

    # --- one step -----------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        watch = Stopwatch()
        restarts_before, broken_before = self._pool.num_restarts, self._pool.num_broken
        groups = Groups(
            self._config.sampling.group_size, ADVANTAGES[self._config.algorithm.advantage]
        )
        complete: asyncio.Queue[list[TrainSample] | None] = asyncio.Queue()
        feeding = asyncio.create_task(self._feed_learner(complete, step))
        try:
            stats = await self._pool.stats()
            watch.skip()
            scored = await self._rollout(step, groups, complete, watch)
            stats_after = await self._pool.stats()
            complete.put_nowait(None)
            record = self._rollout_record(scored, groups, stats, stats_after, watch)
            record |= await self._harvest.record()
            await self._pool_may_sleep(True)
            self._show(f"step {step}: updating the policy", 0, 1)
            record |= await self._update(step, feeding, scored, watch)
        except BaseException:
            feeding.cancel()
            raise
        await self._sync()
        watch.lap("sync")
        record |= {"policy_version": self._version}
        hidden = await self._begin_checkpoint(step, watch)
        every = self._config.eval.every_steps
        if every and (step % every == 0 or step == self._config.run.num_steps):
            record |= await self._evaluate(step, watch)
        record["rollout/engine_restarts"] = self._pool.num_restarts - restarts_before
        record["rollout/broken_samples"] = self._pool.num_broken - broken_before
        record["learner/restarts"], self._learner_restarts = self._learner_restarts, 0
        self._folder.write_samples(step, self._to_read(scored))
        lengths = [len(s.sample.token_ids) for s in scored]
        group_size = self._config.sampling.group_size
        self._lengths.append({"step": step, "group_size": group_size, "tokens": lengths})
        await self._times.step_ended(step, watch, self._streamed)
        self._append({"step": step, **record, **watch.record()})
        if hidden is not None:
            self._checkpoint = asyncio.create_task(self._end_checkpoint(hidden, step))

    def _append(self, record: Record) -> None:
        self._log.append(record)
        self._sinks.log(record)
        self._on_record(record)

    # --- rollout and rewards ------------------------------------------------------------------

    async def _rollout(
        self,
        step: int,
        groups: Groups,
        complete: asyncio.Queue[list[TrainSample] | None],
        watch: Stopwatch,
    ) -> list[Scored]:
        sampling = self._config.sampling
        problems = await asyncio.to_thread(
            self._prepared.source.batch, step, sampling.prompts_per_step
        )
        watch.skip()

        def on_scored(scored: Scored) -> None:
            group = groups.add(
                ScoredSample(
                    sample_id=scored.sample.sample_id,
                    group_id=scored.sample.group_id,
                    prompt_ids=scored.request.prompt_token_ids,
                    response_ids=scored.sample.token_ids,
                    engine_logprobs=scored.sample.logprobs,
                    reward=scored.reward.value,
                )
            )
            if group:
                complete.put_nowait(group)

        return await self._generate(
            f"{step}", problems, sampling.group_size, sampling.temperature, watch, "rollout",
            on_scored, rl_step=step,
        )  # fmt: skip

    async def _generate(
        self,
        label: str,
        problems: Sequence[Problem],
        group_size: int,
        temperature: float,
        watch: Stopwatch,
        stage: str,
        on_scored: Callable[[Scored], None] = lambda scored: None,
        rl_step: int | None = None,
    ) -> list[Scored]:
        """Samples of every problem, each scored as it ends."""
        requests: dict[str, tuple[Problem, SampleRequest]] = {}
        forced = self._forced_lengths(label, len(problems) * group_size, stage)
        ends_forced = bool(forced)
        for number, problem in enumerate(problems):
            prompt = self._prepared.chat.prompt(problem.question)
            for place in range(group_size):
                sample_id = f"{label}/{number:05d}/{place:04d}"
                spec = SamplingSpec(
                    max_tokens=forced.pop() if forced else self._config.sampling.max_tokens,
                    temperature=temperature,
                    seed=self._seed(sample_id),
                    ignore_eos=ends_forced,
                )
                group_id = f"{label}/{number:05d}"
                request = SampleRequest(sample_id, prompt, spec, group_id, rl_step=rl_step)
                requests[sample_id] = problem, request

        async def score(sample: Sample) -> Scored:
            problem, request = requests[sample.sample_id]
            assert sample.policy_version == self._version, "a sample of another policy"
            text = self._prepared.chat.text(sample.token_ids)
            reward = await self._rewards.score(problem, text)
            scored = Scored(problem, request, sample, text, reward)
            on_scored(scored)
            return scored

        scoring = []
        self._show(f"step {label}: generating", 0, len(requests))
        self._harvest.rollout_started(len(requests))
        async for sample in self._pool.generate([request for _, request in requests.values()]):
            scoring.append(asyncio.create_task(score(sample)))
            self._harvest.sample_finished()
            self._show(f"step {label}: generating", len(scoring), len(requests))
        watch.lap(stage)
        scored, _ = await asyncio.gather(asyncio.gather(*scoring), self._harvest.rollout_ended())
        watch.lap("reward_wait" if stage == "rollout" else stage)
        return sorted(scored, key=lambda s: s.sample.sample_id)

    def _forced_lengths(self, label: str, count: int, stage: str) -> list[int]:
        sizes = self._config.debug.forced_lengths
        if sizes is None or stage != "rollout":
            return []
        rng = random.Random(f"{self._config.run.seed}/lengths/{label}")
        return HeavyTail(sizes.median, sizes.p95, sizes.longest).spread(count, rng)

    def _seed(self, sample_id: str) -> int | None:
        if not self._config.sampling.seeded:
            return None
        text = f"{self._config.run.seed}/{sample_id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    async def _evaluate(self, step: int, watch: Stopwatch) -> Record:
        settings = self._config.eval
        problems = self._prepared.held_out
        watch.skip()
        scored = await self._generate(
            f"eval-{step}", problems, 1, settings.temperature, watch, "eval"
        )
        return {
            "eval/reward_mean": _mean([s.reward.value for s in scored]),
            "eval/mean_tokens": _mean([len(s.sample.token_ids) for s in scored]),
        }

    # --- update -------------------------------------------------------------------------------

    async def _feed_learner(
        self, complete: asyncio.Queue[list[TrainSample] | None], step: int
    ) -> list[TrainSample]:
        """Hand complete groups to the learner: as they come where that disturbs nobody.

        What is left for after the rollout is returned.
        """
        learner = self._config.learner
        streaming = self._config.placement.kind == "separate" and learner.updates_per_step == 1
        enough = learner.row_tokens * learner.num_ranks
        waiting: list[TrainSample] = []
        self._streamed = []
        while (group := await complete.get()) is not None:
            waiting += [s for s in group if s.advantage != 0 or self._config.algorithm.kl_weight]
            if streaming and complete.empty() and sum(map(len, waiting)) >= enough:
                started_s = time.monotonic()
                await self._learner.accumulate(waiting, step)
                self._streamed.append(Span("updating", started_s, time.monotonic()))
                waiting = []
        return sorted(waiting, key=lambda s: s.sample_id)

    async def _update(
        self,
        step: int,
        feeding: asyncio.Task[list[TrainSample]],
        scored: Sequence[Scored],
        watch: Stopwatch,
    ) -> Record:
        """Change the policy. Samples of equal groups count, but nothing is computed for them."""
        watch.skip()
        waiting = await feeding
        reports = []
        limit = self._gap.limit()
        max_gap = math.inf if self._config.alarm.then == "warn" else limit
        num_updates = self._config.learner.updates_per_step
        parts: list[list[TrainSample]] = [[] for _ in range(num_updates)]
        lengths: list[list[int]] = [[] for _ in range(num_updates)]
        for sample in waiting:
            parts[_part(sample.sample_id, num_updates)].append(sample)
        for each in scored:
            part = _part(each.sample.sample_id, num_updates)
            lengths[part].append(len(each.sample.token_ids))
        if num_updates > 1:
            for samples in parts:
                await self._learner.remember_logprobs(samples)
        for samples, own_lengths in zip(parts, lengths, strict=True):
            await self._learner.accumulate(samples, step)
            reports.append(
                await self._learner.step(self._weighting.denominator(own_lengths), max_gap)
            )
            self._version += 1
            self._show(f"step {step}: updating the policy", len(reports), num_updates)
        if num_updates > 1:
            await self._learner.forget_logprobs()
        watch.lap("update")
        updates = [report for report, _, _ in reports]
        alarms = self._judge_gaps(step, updates, limit)
        tokens = sum(u.sums.tokens for u in updates)
        learned = max(1.0, sum(u.sums.learned_tokens for u in updates))
        computed = sum(u.sums.computed_tokens for u in updates)
        rows = sum(u.sums.rows for u in updates)
        streamed_s = sum(span.seconds for span in self._streamed)
        captured, self._captured = self._captured, reports[-1][1]
        capture = {"capture/bytes": reports[-1][2]}
        if self._config.capture.by != "engines":
            capture["capture/samples"] = reports[-1][1] - captured
        return {
            "learner/loss": _mean([u.sums.loss for u in updates]),
            "learner/grad_norm": _mean([u.grad_norm for u in updates]),
            "learner/skipped_updates": sum(u.skipped for u in updates),
            "learner/lr": updates[-1].lr,
            "learner/kl": sum(u.sums.kl for u in updates) / learned,
            "learner/clipped_share": sum(u.sums.clipped_tokens for u in updates) / learned,
            "learner/capped_share": sum(u.sums.capped_tokens for u in updates) / learned,
            "learner/gap_mean": sum(u.sums.gap for u in updates) / learned,
            "learner/gap_alarms": alarms,
            "learner/tokens": tokens,
            "learner/tokens_per_s": tokens / max(watch.seconds["update"] + streamed_s, 1e-9),
            "learner/rows": rows,
            "learner/row_fill_share": computed / max(1, rows * self._config.learner.row_tokens),
            "learner/shared_share": 1 - computed / max(1.0, tokens),
            **(capture if self._config.capture.enabled else {}),
        }

    def _judge_gaps(self, step: int, updates: Sequence[UpdateReport], limit: float) -> int:
        """Take note of how far engines and learner are apart; how often that was alarming."""
        then, alarms, text = self._config.alarm.then, 0, ""
        for update in updates:
            gap = update.sums.gap / max(1.0, update.sums.learned_tokens)
            if not update.sums.learned_tokens:
                continue
            if gap <= limit or then == "warn":
                self._gap.observe(gap)
            if gap <= limit:
                continue
            alarms += 1
            text = (
                f"step {step}: engines and learner differ by {gap:.2g} in the log-probability of a "
                f"token, more than {limit:.2g}: these samples may come from another policy"
            )
            follows = "no update was made of them" if update.refused else "trained on all the same"
            logger.error("%s; %s (alarm.then = %r)", text, follows, then)
        in_a_row = self._gap.step_ended(alarms > 0)
        if alarms and then == "stop":
            raise EngineError(f"{text}; alarm.then = 'stop' ends the run here")
        if then == "drop" and in_a_row >= MAX_IN_A_ROW:
            raise EngineError(
                f"{text}; that was so in {in_a_row} steps in a row. See the log for engines that "
                "were replaced; if engines and learner differ on purpose, raise alarm.gap_factor "
                f"(now {self._config.alarm.gap_factor:g}), or set alarm.then = 'warn'"
            )
        return alarms

    async def _sync(self) -> None:
        """The learner's policy into all engines."""
        weights = await self._learner.publish(self._config.policy.dtype)
        await self._pool_may_sleep(False)
        await self._pool.update_policy(weights, self._version)
        self._harvest.policy_changed(weights, self._version)

    async def _pool_may_sleep(self, sleep: bool) -> None:
        """Colocated on GPUs, engines and learner have the memory in turn."""
        if self._config.engine.num_gpus and self._config.placement.kind == "colocated":
            await self._pool.call_all("sleep" if sleep else "wake")

    # --- checkpoints --------------------------------------------------------------------------

    async def _begin_checkpoint(self, step: int, watch: Stopwatch) -> Path | None:
        """Copy the state; the step stands still only for that, or for the one before it."""
        if step % self._config.checkpoint.every_steps and step != self._config.run.num_steps:
            return None
        watch.skip()
        await self._finish_checkpoint()
        hidden = self._folder.begin_checkpoint(step)
        await self._learner.save(hidden)
        watch.lap("checkpoint")
        return hidden

    async def _end_checkpoint(self, hidden: Path, step: int) -> None:
        earlier, _ = self._folder.last_checkpoint()
        await self._learner.wait_saved(hidden, earlier, step)
        await asyncio.to_thread(self._harvest.save, hidden / "drafter")
        await asyncio.to_thread(
            self._folder.publish_checkpoint, hidden, step, self._config.checkpoint.keep
        )
        self._failures = 0

    async def _finish_checkpoint(self) -> None:
        if self._checkpoint is not None:
            checkpoint, self._checkpoint = self._checkpoint, None
            await checkpoint

    def _version_at(self, step: int) -> int:
        return step * self._config.learner.updates_per_step

    async def _go_on_from(self, done: int) -> None:
        """Engines to the policy of the learner, which is where step `done` left it."""
        self._version = self._version_at(done)
        self._captured = 0
        await self._sync()

    async def _revive_learner(self, error: LearnerLost) -> int:
        """Start the ranks again from the last checkpoint; the step it holds."""
        self._learner_restarts += 1
        self._failures += 1
        if self._failures > self._config.learner.max_restarts:
            raise error
        logger.warning("%s; starting the ranks again from the last checkpoint", error)
        self._show("starting the learner again", 0, 1)
        await self._learner.stop()
        if self._checkpoint is not None:
            # Without ranks it fails, unless it is just becoming visible: then it counts.
            await asyncio.gather(self._checkpoint, return_exceptions=True)
            self._checkpoint = None
        remove_abandoned()
        checkpoint, done = self._folder.last_checkpoint()
        await self._pool_may_sleep(True)
        try:
            await self._learner.start(checkpoint)
            await self._go_on_from(done)
        except LearnerLost as again:
            return await self._revive_learner(again)
        self._rewind(done)
        return done

    # --- what is written down -----------------------------------------------------------------

    def _rollout_record(
        self,
        scored: Sequence[Scored],
        groups: Groups,
        before: Sequence[EngineStats],
        after: Sequence[EngineStats],
        watch: Stopwatch,
    ) -> Record:
        lengths = [len(s.sample.token_ids) for s in scored]
        rewards = [s.reward.value for s in scored]
        mean = _mean(rewards)
        rollout_s = max(watch.seconds["rollout"], 1e-9)
        past = _difference(before, after)
        tainted, self._tainted = self._pool.num_tainted - self._tainted, self._pool.num_tainted
        # Also what engines did between the rollouts: they took the policy of this step.
        whole, self._last_stats = _difference(self._last_stats, after), after
        drafts, accepted, busy_s = past.drafts, past.accepted_tokens, past.busy_s
        self._harvest.alarm(past.model_drafts, past.model_accepted_tokens)
        summary = length_summary(lengths)
        return {
            "reward/mean": mean,
            "reward/std": _mean([(r - mean) ** 2 for r in rewards]) ** 0.5,
            "reward/groups_with_signal_share": groups.num_with_signal / max(1, groups.num_groups),
            "reward/faults": sum(s.reward.fault is not None for s in scored),
            "prompt/mean_tokens": _mean([len(s.request.prompt_token_ids) for s in scored]),
            "response/mean_tokens": _mean(lengths),
            **{f"response/{name}": value for name, value in summary.items()},
            "response/truncated_share": _mean([s.sample.finish_reason == "length" for s in scored]),
            "rollout/output_tokens": sum(lengths),
            "rollout/tokens_per_s": sum(lengths) / rollout_s,
            "rollout/acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            **(
                {"rollout/drafter_hit_share": past.model_first_accepted / past.model_drafts}
                if past.model_drafts
                else {}
            ),
            "rollout/idle_share": max(0.0, 1 - busy_s / (rollout_s * max(1, len(after)))),
            "rollout/policy_mismatches": whole.policy_mismatches + tainted,
            "rollout/fingerprint_s": whole.fingerprint_s,
            "drafter_version": max((s.drafter_version for s in after), default=0),
            **(
                {"capture/samples": past.captured_samples}
                if self._config.capture.by == "engines"
                else {}
            ),
        }

    def _to_read(self, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        """A few samples, from as many problems as there are."""
        count = self._config.metrics.keep_samples
        by_place = sorted(scored, key=lambda s: s.sample.sample_id.rsplit("/", 1)[-1])
        return [
            {
                "problem": s.problem.problem_id,
                "question": s.problem.question,
                "answer": s.problem.answer,
                "response": s.text,
                "reward": s.reward.value,
                "fault": s.reward.fault,
                "num_tokens": len(s.sample.token_ids),
                "finish_reason": s.sample.finish_reason,
            }
            for s in by_place[:count]
        ]


def _difference(before: Sequence[EngineStats], after: Sequence[EngineStats]) -> EngineStats:
    """What all engines did in between; a new engine counts from nothing."""
    earlier = {stats.engine: stats for stats in before}
    nothing = EngineStats("")
    pairs = [(earlier.get(stats.engine, nothing), stats) for stats in after]
    return EngineStats(
        engine="all",
        drafts=sum(b.drafts - a.drafts for a, b in pairs),
        accepted_tokens=sum(b.accepted_tokens - a.accepted_tokens for a, b in pairs),
        model_drafts=sum(b.model_drafts - a.model_drafts for a, b in pairs),
        model_accepted_tokens=sum(
            b.model_accepted_tokens - a.model_accepted_tokens for a, b in pairs
        ),
        model_first_accepted=sum(b.model_first_accepted - a.model_first_accepted for a, b in pairs),
        busy_s=sum(b.busy_s - a.busy_s for a, b in pairs),
        captured_samples=sum(b.captured_samples - a.captured_samples for a, b in pairs),
        policy_mismatches=sum(b.policy_mismatches - a.policy_mismatches for a, b in pairs),
        fingerprint_s=sum(b.fingerprint_s - a.fingerprint_s for a, b in pairs),
    )


def _part(sample_id: str, num_parts: int) -> int:
    """Which of a step's updates a sample belongs to, by its problem's number."""
    return int(sample_id.split("/")[-2]) % num_parts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
