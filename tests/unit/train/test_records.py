"""What is written down about a step, without engines."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_run

pytest.importorskip("ray")

from tlt.contracts import EngineStats, FinishReason, Sample, SampleRequest, SamplingSpec, Scored
from tlt.learner.advantage import grpo
from tlt.learner.batch import Groups
from tlt.observe.metrics import check_names
from tlt.observe.record import read
from tlt.observe.sinks import Samples, Sinks
from tlt.observe.stopwatch import Stopwatch
from tlt.observe.timekeeper import NoTimekeeper
from tlt.tasks.gym import Problem
from tlt.train.folder import RunFolder
from tlt.train.records import (
    PoolCounters,
    PoolWork,
    RunLog,
    eval_record,
    replacement_record,
    rollout_record,
    samples_to_read,
    update_record,
)

PROBLEMS = [Problem("a", "1 + 1?", "2"), Problem("b", "1 + 2?", "3")]


def scored(number: int, place: int, tokens: int, reward: float, fault: str | None = None) -> Scored:
    request = SampleRequest(f"1/{number}/{place}", (1, 2, 3), SamplingSpec(max_tokens=8))
    reason: FinishReason = "length" if tokens == 8 else "stop"
    ids = (5,) * tokens
    sample = Sample(request.sample_id, ids, (), reason, "engine-0", 0, 0.0, 0.0, 0.0)
    return Scored(number, place, request, sample, "5" * tokens, reward, fault)


STEP = [
    scored(0, 0, 4, 1.0),
    scored(0, 1, 8, 0.0),
    scored(1, 0, 2, 1.0),
    scored(1, 1, 2, 1.0, "timeout"),
]
NOTHING = EngineStats("all")


def record(work: PoolWork, engines_capture: bool = False) -> dict[str, float]:
    groups = Groups(2, grpo)
    for sample in STEP:
        groups.add(sample)
    return rollout_record(STEP, groups, work, 2.0, engines_capture)


def test_a_rollout_record() -> None:
    during = EngineStats("all", busy_s=3.0, drafts=10, accepted_tokens=5, drafter_version=2)
    since = EngineStats("all", policy_mismatches=1, fingerprint_s=0.25)
    found = record(PoolWork(during, since, num_engines=2, num_tainted=1))
    assert found["reward/mean"] == pytest.approx(2 / 3), "the sample with a fault has no reward"
    assert found["reward/std"] == pytest.approx((2 / 9) ** 0.5)
    assert found["reward/group_std_mean"] == 0.25, "0.5 and 0"
    assert found["reward/groups_with_signal_share"] == 0.5
    assert found["reward/groups_all_right_share"] == 0.5, "the second, by its only reward"
    assert found["reward/groups_none_right_share"] == 0.0
    assert (found["reward/faults"], found["reward/fault_share"]) == (1, 0.25)
    assert found["prompt/mean_tokens"] == 3
    assert found["response/mean_tokens"] == 4
    assert found["response/truncated_share"] == 0.25
    assert found["rollout/output_tokens"] == 16
    assert found["rollout/tokens_per_s"] == 8.0
    assert found["rollout/acceptance_length"] == 1.5
    assert found["rollout/idle_share"] == 0.25
    assert found["rollout/policy_mismatches"] == 2
    assert found["rollout/fingerprint_s"] == 0.25
    assert found["drafter_version"] == 2
    assert not {"rollout/drafter_hit_share", "capture/samples"} & {*found}


def test_a_rollout_record_has_the_draft_model_and_the_capture_only_where_they_are() -> None:
    during = EngineStats("all", model_drafts=4, model_first_accepted=3, captured_samples=7)
    found = record(PoolWork(during, NOTHING, 1, 0), engines_capture=True)
    assert found["rollout/drafter_hit_share"] == 0.75
    assert found["capture/samples"] == 7
    assert found["rollout/acceptance_length"] == 1.0


def test_a_replacement_record() -> None:
    groups = Groups(2, grpo, only_signal=True)
    for sample in STEP:
        groups.add(sample)
    found = replacement_record(STEP, groups, num_wanted=1)
    assert found["rollout/replacement_share"] == 0.5
    assert found["rollout/discarded_share"] == 0.5
    assert found["rollout/missing_groups"] == 0
    assert replacement_record(STEP, groups, num_wanted=2)["rollout/missing_groups"] == 1


def test_an_eval_record() -> None:
    found = eval_record(STEP)
    assert found == {
        **{"eval/reward_mean": pytest.approx(2 / 3), "eval/mean_tokens": 4.0},
        **{"eval/truncated_share": 0.25, "eval/mean_at_2": 0.5},
        **{"eval/pass_at_1": 0.5, "eval/pass_at_2": 1.0},
    }, "the sample without a reward counts as wrong, but not in the mean reward"
    of_set = eval_record(STEP, "aime")
    assert of_set == {name.replace("eval/", "eval/aime/"): of for name, of in found.items()}
    check_names(of_set)
    assert eval_record([])["eval/reward_mean"] == 0.0


def test_pass_at_k_of_a_record_is_unbiased() -> None:
    """Over all ways in which samples of one problem may end, weighted by their chance."""
    share, expected = 0.3, 0.0
    for ends in itertools.product([0.0, 1.0], repeat=4):
        chance = math.prod(share if end else 1 - share for end in ends)
        record = eval_record([scored(0, place, 4, end) for place, end in enumerate(ends)])
        expected += chance * record["eval/pass_at_2"]
    assert expected == pytest.approx(1 - (1 - share) ** 2)


def update(**sums: float) -> Any:
    names = ("loss", "tokens", "computed_tokens", "learned_tokens", "rows", "clipped_tokens")
    values = dict.fromkeys((*names, "capped_tokens", "gap", "kl", "entropy"), 0.0) | sums
    return SimpleNamespace(sums=SimpleNamespace(**values), grad_norm=2.0, lr=1e-3, skipped=True)


def test_an_update_record() -> None:
    updates = [
        update(loss=1.0, tokens=60, computed_tokens=30, learned_tokens=20, rows=1, gap=2, kl=4),
        update(
            **{"loss": 3.0, "tokens": 40, "computed_tokens": 20, "learned_tokens": 20, "rows": 1},
            **{"clipped_tokens": 8, "entropy": 50},
        ),
    ]
    found = update_record(updates, alarms=1, seconds=4.0, row_tokens=100, kl_weight=0.1)
    assert found["learner/loss"] == 2.0
    assert found["learner/skipped_updates"] == 2
    assert found["learner/kl"] == 0.1
    assert found["learner/entropy"] == 1.25
    alone = update_record([update()], 0, 4.0, 100, kl_weight=0.0)
    assert "learner/entropy" not in alone, "no group had a signal"
    assert "learner/kl" not in alone, "no reference"
    assert found["learner/clipped_share"] == 0.2
    assert found["learner/gap_mean"] == 0.05
    assert found["learner/gap_alarms"] == 1
    assert found["learner/tokens_per_s"] == 25.0
    assert found["learner/row_fill_share"] == 0.25
    assert found["learner/shared_share"] == 0.5


def test_samples_to_read_are_from_as_many_problems_as_there_are() -> None:
    found = samples_to_read(PROBLEMS, STEP, 3)
    assert [s["problem"] for s in found] == ["a", "b", "a"]
    assert found[1] == {
        **{"problem": "b", "question": "1 + 2?", "answer": "3", "response": "55"},
        **{"reward": 1.0, "fault": None, "num_tokens": 2, "finish_reason": "stop"},
    }


class FakePool:
    def __init__(self) -> None:
        self.num_restarts = self.num_broken = self.num_tainted = self.num_kept_tokens = 0
        self.engines: Sequence[EngineStats] = ()

    async def stats(self) -> Sequence[EngineStats]:
        return self.engines


async def test_counters_are_those_of_the_rollout_and_a_new_engine_counts_from_zero() -> None:
    pool: Any = FakePool()
    counters = PoolCounters(pool)
    pool.engines = [EngineStats("engine-0", drafts=5, policy_mismatches=1)]
    pool.num_restarts = 3
    await counters.step_started()
    pool.engines = [
        EngineStats("engine-0", drafts=7, policy_mismatches=1, drafter_version=1),
        EngineStats("engine-1.1", drafts=2),
    ]
    pool.num_restarts, pool.num_broken, pool.num_tainted, pool.num_kept_tokens = 4, 2, 1, 60
    work = await counters.rollout_ended()
    assert (work.during.drafts, work.during.policy_mismatches) == (4, 0)
    assert (work.since_last.drafts, work.since_last.policy_mismatches) == (9, 1)
    assert (work.num_engines, work.num_tainted, work.during.drafter_version) == (2, 1, 1)
    ended = {"rollout/engine_restarts": 1, "rollout/broken_samples": 2, "rollout/kept_tokens": 60}
    assert counters.step_ended() == ended
    await counters.step_started()
    again = await counters.rollout_ended()
    assert (again.during.drafts, again.since_last.drafts, again.num_tainted) == (0, 0, 0)


async def test_the_log_writes_every_step_once(tmp_path: Path) -> None:
    sent: list[tuple[float, list[Any]]] = []

    class Sent:
        def log(self, record: dict[str, float], samples: Samples = ()) -> None:
            sent.append((record["step"], [sample["problem"] for sample in samples]))

        def close(self) -> None: ...

    folder = RunFolder(tmp_path)
    folder.timeline.write_text("of an earlier attempt")
    live: Any = SimpleNamespace(record={})
    seen: list[dict[str, float]] = []

    log = RunLog(
        small_run(metrics={"keep_samples": 3}),
        folder,
        Sinks([Sent()]),
        NoTimekeeper(folder.timeline),
        live,
        seen.append,
    )
    log.rewind(-1)
    for step in (1, 2):
        log.samples(step, PROBLEMS, STEP)
        await log.step(step, {"reward/mean": float(step)}, Stopwatch())
    log.rewind(1)  # the learner was lost after step 1
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000001.jsonl"]
    log.samples(2, PROBLEMS, STEP)
    await log.step(2, {"reward/mean": 5.0}, Stopwatch())
    log.close()
    assert not folder.timeline.exists()
    assert [(r["step"], r["reward/mean"]) for r in read(folder.metrics)] == [(1, 1.0), (2, 5.0)]
    assert read(folder.lengths)[1] == {"step": 2, "group_size": 2, "tokens": [4, 8, 2, 2]}
    assert [r["reward/mean"] for r in seen] == [1.0, 2.0, 5.0]
    assert live.record == seen[-1]
    assert sent == [(1, ["a", "b", "a"]), (2, ["a", "b", "a"]), (2, ["a", "b", "a"])]
    assert next(iter(seen[-1])) == "step"
    lines = (tmp_path / "samples" / "step-000002.jsonl").read_text().splitlines()
    assert [json.loads(line)["problem"] for line in lines] == ["a", "b", "a"]
