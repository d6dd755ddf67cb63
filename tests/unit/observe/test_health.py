"""Signs of a run that does not learn, and the end of such a run."""

import pytest

from tlt.errors import TrainingFailed
from tlt.observe.health import HealthWatch, late, signs


def record(step: int, skipped: float = 0.0, fault_share: float = 0.0) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 0.5,
        "reward/faults": 100 * fault_share,
        "reward/fault_share": fault_share,
        "learner/skipped_updates": skipped,
        "checkpoint/faults": 0.0,
    }


def test_a_healthy_run_has_no_signs() -> None:
    assert list(signs([record(step, fault_share=0.01) for step in range(1, 30)])) == []
    assert list(signs([])) == []


def test_signs_name_their_steps() -> None:
    records = [record(step, skipped=float(step % 2)) for step in range(1, 24)]
    records.append(record(24) | {"checkpoint/faults": 1.0})
    skipped, unwritten = signs(records)
    assert "RL steps 1, 3, 5, 7, 9, 11, 13, 15 and 4 more," in skipped.says
    assert "RL step 24," in unwritten.says


def test_late_work_of_an_emulation_asks_for_a_higher_dilation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_time = record(1) | {"emulate/late_s_share": 0.019}
    assert list(late([in_time])) == []
    behind = record(2) | {"emulate/late_s_share": 0.5}
    (found,) = late([in_time, behind])
    assert "In RL step 2, up to 50% of the engine seconds went beyond" in found.says
    assert "emulate.dilation" in found.change
    HealthWatch(max_steps=3, updates_per_step=2).observe(behind)
    assert "beyond their emulated time" in caplog.text


def test_a_run_that_learns_nothing_ends() -> None:
    for lost in (record(1, skipped=2.0), record(1, fault_share=0.51)):
        watch = HealthWatch(max_steps=3, updates_per_step=2)
        for good in (lost, lost, record(1, skipped=1.0, fault_share=0.5), lost, lost):
            watch.observe(good)
        with pytest.raises(TrainingFailed, match=r"alarm\.max_lost_steps = 0"):
            watch.observe(lost)


def test_a_run_may_be_told_to_go_on() -> None:
    watch = HealthWatch(max_steps=0, updates_per_step=1)
    for step in range(20):
        watch.observe(record(step, skipped=1.0, fault_share=1.0))
