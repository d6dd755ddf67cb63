"""The policy update with a learner that only notes what it is asked."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_run

pytest.importorskip("ray")

from tlt.config.train import EmulateConfig
from tlt.contracts import ONE_TURN, Sample, SampleRequest, SamplingSpec, Scored, Turns
from tlt.harvest.contract import NoHarvest
from tlt.harvest.forecast import TailForecast
from tlt.learner.batch import TrainSample
from tlt.observe.live import Live
from tlt.observe.stopwatch import Stopwatch
from tlt.states.writer import Stored
from tlt.timing.node import update_s
from tlt.train.update import PolicyUpdate

SUMS = (
    *("loss", "tokens", "computed_tokens", "rows", "clipped_tokens", "capped_tokens"),
    *("gap", "kl", "entropy"),
)


class FakeLearner:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def accumulate(self, samples: Sequence[TrainSample], rl_step: int) -> None:
        self.calls.append(("accumulate", [s.sample_id for s in samples]))

    async def remember_logprobs(self, samples: Sequence[TrainSample]) -> None:
        self.calls.append(("remember", [s.sample_id for s in samples]))

    async def forget_logprobs(self) -> None:
        self.calls.append(("forget", None))

    async def step(self, denominator: float, max_gap: float) -> tuple[Any, Stored]:
        self.calls.append(("step", denominator))
        sums = SimpleNamespace(**dict.fromkeys(SUMS, 0.0), learned_tokens=1.0)
        report = SimpleNamespace(sums=sums, grad_norm=1.0, lr=1e-3, skipped=False, refused=False)
        return report, Stored(num_samples=10, num_dropped=3, num_bytes=1000)


def group(number: int, advantages: Sequence[float]) -> list[TrainSample]:
    return [
        TrainSample(f"{number}/{place}", number, (1,) * 3, (2,) * 2, (0.0,) * 2, advantage)
        for place, advantage in enumerate(advantages)
    ]


def scored(number: int, place: int, fault: str | None = None, turns: Turns = ONE_TURN) -> Scored:
    request = SampleRequest(f"{number}/{place}", (1,) * 3, SamplingSpec(max_tokens=8))
    sample = Sample(request.sample_id, (2,) * 2, (), "stop", "engine-0", 0, 0.0, 0.0, 0.0)
    return Scored(number, place, request, sample, "", 0.0, fault, turns)


async def one_step(
    groups: Sequence[list[TrainSample]],
    faults: Sequence[int] = (),
    numbers: Sequence[int] = range(4),
    turns: Turns = ONE_TURN,
    **sections: Any,
) -> tuple[list[tuple[str, Any]], PolicyUpdate, dict[str, float]]:
    learner: Any = FakeLearner()
    pool: Any = SimpleNamespace()
    live = Live(Path("live.json"), 1, pool, NoHarvest(), TailForecast(), lambda *_: None)
    update = PolicyUpdate(small_run(**sections), learner, live)
    update.begin(1)
    for each in groups:
        update.add(each)
        for _ in range(3):
            await asyncio.sleep(0)
    update.rollout_ended()
    samples = [
        scored(number, place, "timeout" if number in faults else None, turns)
        for number in numbers
        for place in range(2)
    ]
    record = await update.finish(1, samples, Stopwatch(), 0)
    return learner.calls, update, record


GROUPS = [group(3, (1, -1)), group(0, (-1, 1)), group(2, (0, 0)), group(1, (1, -1))]
"""In the order in which they were complete."""


async def test_the_learner_gets_all_samples_with_an_advantage_in_order() -> None:
    calls, update, record = await one_step(GROUPS)
    assert calls == [
        ("accumulate", ["0/0", "0/1", "1/0", "1/1", "3/0", "3/1"]),
        ("step", 16.0),
    ]
    assert update.version == 1
    assert update.streamed == []
    assert "capture/bytes" not in record


async def test_the_mean_leaves_out_samples_without_a_reward() -> None:
    calls, _, _ = await one_step([GROUPS[0]], faults=(0, 1, 2))
    assert calls == [("accumulate", ["3/0", "3/1"]), ("step", 4.0)]


async def test_the_mean_is_over_tokens_that_the_policy_drew() -> None:
    calls, _, _ = await one_step(GROUPS, turns=Turns(((0, 1),), 2))
    assert calls[-1] == ("step", 8.0)


async def test_an_emulated_update_takes_the_time_of_all_gpus() -> None:
    emulate = EmulateConfig(hardware="h100", dilation=1)
    started_s = time.monotonic()
    _, _, record = await one_step(GROUPS, emulate=emulate.model_dump(), pool={"num_engines": 8})
    taken_s = time.monotonic() - started_s
    assert taken_s >= update_s(emulate, 8, 0)
    assert record["emulate/update_late_s"] == 0


async def test_with_a_kl_term_every_sample_counts() -> None:
    calls, _, _ = await one_step(GROUPS, algorithm={"kl_weight": 0.1})
    assert len(calls[0][1]) == 8


async def test_several_updates_share_the_problems_and_remember_the_policy_before_them() -> None:
    calls, update, _ = await one_step(GROUPS, learner={"updates_per_step": 2})
    even, odd = ["0/0", "0/1"], ["1/0", "1/1", "3/0", "3/1"]
    assert calls == [
        *(("remember", even), ("remember", odd)),
        *(("accumulate", even), ("step", 8.0), ("accumulate", odd), ("step", 8.0)),
        ("forget", None),
    ]
    assert update.version == 2
    update.go_on_from(5)
    assert update.version == 10


async def test_several_updates_share_what_dynamic_sampling_kept() -> None:
    """The numbers of discarded groups are missing, but no update gets more groups than another."""
    groups = [group(number, (1, -1)) for number in (0, 2, 4, 6)]
    calls, _, _ = await one_step(groups, numbers=(0, 2, 4, 6), learner={"updates_per_step": 2})
    assert [names for what, names in calls if what == "accumulate"] == [
        ["0/0", "0/1", "4/0", "4/1"],
        ["2/0", "2/1", "6/0", "6/1"],
    ]
    assert [denominator for what, denominator in calls if what == "step"] == [8.0, 8.0]


async def test_a_learner_with_devices_of_its_own_begins_during_the_rollout() -> None:
    calls, update, _ = await one_step(
        GROUPS, placement={"kind": "separate"}, learner={"row_tokens": 12}
    )
    assert calls == [
        ("accumulate", ["3/0", "3/1", "0/0", "0/1"]),
        ("accumulate", ["1/0", "1/1"]),
        ("step", 16.0),
    ]
    assert len(update.streamed) == 1


@pytest.mark.parametrize(("by", "samples"), [("learner", 10), ("engines", None)])
async def test_captured_samples_are_counted_where_they_are_captured(by: str, samples: Any) -> None:
    _, _, record = await one_step(GROUPS, capture={"enabled": True, "by": by})
    assert record["capture/bytes"] == 1000
    assert record.get("capture/samples") == samples
    assert record.get("capture/dropped") == (None if samples is None else 3)
