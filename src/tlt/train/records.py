"""A run's records of every RL step.

The functions are pure: they make records from numbers that the loop already has. `RunLog` writes
all records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from tlt.config.train import TrainConfig
from tlt.contracts import EngineStats, Scored
from tlt.learner.batch import Groups
from tlt.observe.live import Live
from tlt.observe.metrics import declared
from tlt.observe.record import MetricsLog, StepLog
from tlt.observe.sinks import Sinks
from tlt.observe.stopwatch import Stopwatch
from tlt.observe.timekeeper import NoTimekeeper, Timekeeper
from tlt.rollout.pool import RolloutPool
from tlt.spans import Span
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import RIGHT, pass_shares
from tlt.tasks.tail import length_summary
from tlt.train.folder import RunFolder

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport

logger = logging.getLogger(__name__)

Record = dict[str, float]
LOGGED = (
    *("reward/mean", "eval/reward_mean", "response/mean_tokens", "rollout/tokens_per_s"),
    *("rollout/acceptance_length", "learner/gap_mean", "time/step_s"),
)
"""Metrics of an RL step that are also in run.log."""


@dataclass(frozen=True, slots=True)
class PoolWork:
    """The work of the pool's engines in one rollout."""

    during: EngineStats
    """Counters of all engines over the rollout."""
    since_last: EngineStats
    """Counters since the end of the rollout before, so the weight sync is included."""
    num_engines: int
    num_tainted: int
    """Engines replaced since the rollout before because they held another policy."""


class PoolCounters:
    """Reads the pool's counters at the beginning and the end of a rollout and of an RL step."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool
        self._before: Sequence[EngineStats] = ()
        self._last: Sequence[EngineStats] = ()
        self._restarts = self._broken = self._tainted = 0

    async def step_started(self) -> None:
        self._restarts, self._broken = self._pool.num_restarts, self._pool.num_broken
        self._kept_tokens = self._pool.num_kept_tokens
        self._before = await self._pool.stats()

    async def rollout_ended(self) -> PoolWork:
        after = await self._pool.stats()
        last, self._last = self._last, after
        tainted, self._tainted = self._tainted, self._pool.num_tainted
        return PoolWork(
            during=EngineStats.difference(self._before, after),
            since_last=EngineStats.difference(last, after),
            num_engines=len(after),
            num_tainted=self._tainted - tainted,
        )

    def step_ended(self) -> Record:
        return {
            "rollout/engine_restarts": self._pool.num_restarts - self._restarts,
            "rollout/kept_tokens": self._pool.num_kept_tokens - self._kept_tokens,
            "rollout/broken_samples": self._pool.num_broken - self._broken,
        }


def rollout_record(
    scored: Sequence[Scored],
    groups: Groups,
    work: PoolWork,
    rollout_s: float,
    engines_capture: bool,
    emulated: bool = False,
) -> Record:
    lengths = [len(s.sample.token_ids) for s in scored]
    num_drawn = sum(s.num_drawn for s in scored)
    rewards = [s.reward for s in scored if s.fault is None]
    groups_rewards = _by_problem((s for s in scored if s.fault is None), lambda s: s.reward)
    rollout_s = max(rollout_s, 1e-9)
    during, since_last = work.during, work.since_last
    record = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/group_std_mean": _mean([_std(of) for of in groups_rewards]),
        "reward/groups_with_signal_share": groups.num_with_signal / max(1, groups.num_groups),
        "reward/groups_all_right_share": _mean([min(of) >= RIGHT for of in groups_rewards]),
        "reward/groups_none_right_share": _mean([max(of) < RIGHT for of in groups_rewards]),
        "reward/faults": len(scored) - len(rewards),
        "reward/fault_share": _mean([s.fault is not None for s in scored]),
        "prompt/mean_tokens": _mean([len(s.request.prompt_token_ids) for s in scored]),
        "response/mean_tokens": _mean(lengths),
        **{f"response/{name}": value for name, value in length_summary(lengths).items()},
        "response/truncated_share": _mean([s.sample.finish_reason == "length" for s in scored]),
        "rollout/output_tokens": num_drawn,
        "rollout/tokens_per_s": num_drawn / rollout_s,
        "rollout/acceptance_length": during.acceptance_length,
    }
    if during.model_drafts:
        hits = during.model_first_accepted / during.model_drafts
        record["rollout/drafter_hit_share"] = hits
    busy_share = during.busy_s / (rollout_s * max(1, work.num_engines))
    record |= {
        "rollout/idle_share": max(0.0, 1 - busy_share),
        "rollout/policy_mismatches": since_last.policy_mismatches + work.num_tainted,
        "rollout/fingerprint_s": since_last.fingerprint_s,
        "drafter_version": during.drafter_version,
    }
    if emulated:
        record["emulate/late_share"] = since_last.late / max(1, since_last.steps)
        record["emulate/late_s_share"] = since_last.late_s / max(1e-9, since_last.busy_s)
        record["emulate/commands_late_s"] = since_last.commands_late_s / work.num_engines
    if engines_capture:
        record["capture/samples"] = during.captured_samples
        record["capture/dropped"] = during.dropped_samples
    return record


def turns_record(scored: Sequence[Scored]) -> Record:
    """Return the metrics of the environment in a run with tools."""
    turns = [s.turns for s in scored]
    return {
        "tools/turns_mean": _mean([each.num_turns for each in turns]),
        "tools/turns_max": max((each.num_turns for each in turns), default=0),
        "tools/answer_tokens": sum(each.num_observed for each in turns),
        "tools/errors": sum(each.num_errors for each in turns),
        "tools/wait_s_mean": _mean([each.tool_s for each in turns]),
    }


def replacement_record(scored: Sequence[Scored], groups: Groups, num_wanted: int) -> Record:
    """Return what dynamic sampling did; the numbers of extra problems follow those asked for."""
    num_kept = groups.num_groups - len(groups.discarded)
    return {
        "rollout/replacement_share": _mean([s.problem_number >= num_wanted for s in scored]),
        "rollout/discarded_share": len(groups.discarded) / max(1, groups.num_groups),
        "rollout/missing_groups": num_wanted - num_kept,
    }


def update_record(
    updates: Sequence[UpdateReport],
    alarms: int,
    seconds: float,
    row_tokens: int,
    kl_weight: float,
) -> Record:
    tokens = sum(u.sums.tokens for u in updates)
    num_learned = sum(u.sums.learned_tokens for u in updates)
    learned = max(1.0, num_learned)
    computed = sum(u.sums.computed_tokens for u in updates)
    rows = sum(u.sums.rows for u in updates)
    record: Record = {
        "learner/loss": _mean([u.sums.loss for u in updates]),
        "learner/grad_norm": _mean([u.grad_norm for u in updates]),
        "learner/skipped_updates": sum(u.skipped for u in updates),
        "learner/lr": updates[-1].lr,
        "learner/clipped_share": sum(u.sums.clipped_tokens for u in updates) / learned,
        "learner/capped_share": sum(u.sums.capped_tokens for u in updates) / learned,
        "learner/gap_mean": sum(u.sums.gap for u in updates) / learned,
        "learner/gap_alarms": alarms,
        "learner/tokens": tokens,
        "learner/tokens_per_s": tokens / max(seconds, 1e-9),
        "learner/rows": rows,
        "learner/row_fill_share": computed / max(1, rows * row_tokens),
        "learner/shared_share": 1 - computed / max(1.0, tokens),
    }
    if kl_weight > 0:
        record["learner/kl"] = sum(u.sums.kl for u in updates) / learned
    if num_learned:
        record["learner/entropy"] = sum(u.sums.entropy for u in updates) / num_learned
    return record


def eval_record(scored: Sequence[Scored], name: str = "") -> Record:
    """Return the record of a held-out set; all its problems have as many samples."""
    area = f"eval/{name}" if name else "eval"
    record = {
        f"{area}/reward_mean": _mean([s.reward for s in scored if s.fault is None]),
        f"{area}/mean_tokens": _mean([len(s.sample.token_ids) for s in scored]),
        f"{area}/truncated_share": _mean([s.sample.finish_reason == "length" for s in scored]),
    }
    rewards = _by_problem(scored, lambda s: 0.0 if s.fault else s.reward)
    if rewards:
        num_samples = len(rewards[0])
        right = [sum(reward >= RIGHT for reward in of) for of in rewards]
        record[f"{area}/mean_at_{num_samples}"] = _mean([_mean(of) for of in rewards])
        for k, shares in pass_shares(num_samples, right).items():
            record[f"{area}/pass_at_{k}"] = _mean(shares)
    return record


def _by_problem(scored: Iterable[Scored], value: Callable[[Scored], float]) -> list[list[float]]:
    """Return the values of each problem's samples."""
    found: dict[int, list[float]] = {}
    for each in scored:
        found.setdefault(each.problem_number, []).append(value(each))
    return list(found.values())


def samples_to_read(
    problems: Sequence[Problem], scored: Sequence[Scored], count: int
) -> list[dict[str, Any]]:
    """Return a few samples, from as many problems as there are."""
    return [
        {
            "problem": problems[s.problem_number].problem_id,
            "question": problems[s.problem_number].question,
            "answer": problems[s.problem_number].answer,
            "response": s.text,
            "reward": s.reward,
            "fault": s.fault,
            "num_tokens": len(s.sample.token_ids),
            "finish_reason": s.sample.finish_reason,
        }
        for s in sorted(scored, key=lambda s: s.place)[:count]
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _std(values: Sequence[float]) -> float:
    return pstdev(values) if values else 0.0


class RunLog:
    """Writes the records of a run: metrics, lengths, samples to read, timeline, sinks."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        sinks: Sinks,
        times: Timekeeper | NoTimekeeper,
        live: Live,
        on_record: Callable[[Record], None],
    ) -> None:
        self._group_size = config.sampling.group_size
        self._keep_samples = config.metrics.keep_samples
        self._folder = folder
        self._metrics = MetricsLog(folder.metrics)
        self._lengths = StepLog(folder.lengths)
        self._sinks = sinks
        self._to_read: list[dict[str, Any]] = []
        self._times = times
        self._on_record = on_record
        self.live = live

    def rewind(self, step: int) -> None:
        """Drop the records after this RL step, which the run does again; -1 drops all."""
        for log in (self._metrics, self._lengths, self._times):
            log.rewind(step)
        self._folder.forget_samples(step)

    def samples(self, step: int, problems: Sequence[Problem], scored: Sequence[Scored]) -> None:
        """Write an RL step's samples to read, and the lengths of all its responses."""
        self._to_read = samples_to_read(problems, scored, self._keep_samples)
        self._folder.write_samples(step, self._to_read)
        lengths = [len(s.sample.token_ids) for s in scored]
        self._lengths.append({"step": step, "group_size": self._group_size, "tokens": lengths})

    async def step(
        self, step: int, record: Record, watch: Stopwatch, streamed: Sequence[Span] = ()
    ) -> None:
        """Write the RL step's timeline, then its line of metrics: the step is done."""
        await self._times.step_ended(step, watch, streamed)
        record = {"step": step, **record, **watch.record()}
        self._metrics.append(record)
        self._sinks.log(record, self._to_read)
        self._to_read = []
        shown = [name for name in record if declared(name) in LOGGED]
        numbers = ", ".join(f"{name} {record[name]:.4g}" for name in shown)
        logger.info("RL step %d is done: %s", step, numbers)
        self.live.record = record
        self._on_record(record)

    def close(self) -> None:
        self._metrics.close()
        self._lengths.close()
