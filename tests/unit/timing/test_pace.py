"""Work takes its emulated time, and what takes longer is counted."""

import pytest

from tlt.config.train import EmulateConfig
from tlt.contracts import OFF, Arm
from tlt.timing import profiles
from tlt.timing.node import Node, update_s
from tlt.timing.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def paced(dilation: float = 10.0) -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(dilation, clock, clock.sleep), clock


def test_work_takes_its_time_and_no_longer() -> None:
    pace, clock = paced()
    with pace.takes(0.5):
        clock.now_s += 2.0
    assert clock.now_s == pytest.approx(105.0)
    assert pace.late == 0
    assert pace.late_s == pytest.approx(0.0)


def test_an_overrun_is_counted_and_not_waited_for() -> None:
    pace, clock = paced()
    with pace.takes(0.5):
        clock.now_s += 6.0
    assert clock.now_s == 106.0
    assert pace.late == 1
    assert pace.late_s == pytest.approx(1.0)


def test_a_process_that_wakes_late_counts_as_late() -> None:
    clock = Clock()
    pace = Pace(10.0, clock, lambda seconds: clock.sleep(seconds + 0.3))
    pace.wait(100.0, 0.1)
    assert pace.late == 1
    assert pace.late_s == pytest.approx(clock.now_s - 101.0)


def test_a_wait_can_be_broken_off() -> None:
    pace, clock = paced()
    pace.wait(100.0, 10.0, lambda: clock.now_s > 103)
    assert clock.now_s == pytest.approx(103.0, abs=0.05)
    assert pace.late == 0


def test_without_a_dilation_nothing_waits_or_counts() -> None:
    pace, clock = paced(0.0)
    with pace.takes(5.0):
        pass
    assert pace.left_s(9.0, 5.0) == 0.0
    assert (clock.now_s, pace.late, pace.late_s) == (100.0, 0, 0.0)


def test_what_is_left_to_wait_elsewhere() -> None:
    pace, _ = paced()
    assert pace.left_s(2.0, 0.5) == 3.0
    assert pace.left_s(7.0, 0.5) == 0.0
    assert (pace.late, pace.late_s) == (1, 2.0)


# --- the times of a node --------------------------------------------------------------------------


def node() -> Node:
    found = Node.of(EmulateConfig(hardware="h100").settings)
    assert found is not None
    return found


def test_nothing_is_emulated_by_default() -> None:
    assert EmulateConfig().settings is None
    assert Node.of(None) is None


def test_an_engine_step_takes_what_the_simulator_says() -> None:
    found, arm = node(), Arm("eagle3", 3)
    model = profiles.h100(*profiles.MODELS["qwen2.5-7b"], 1)
    assert found.step_s(arm, arm, 4, 400, 0) == pytest.approx(float(model.step_s(arm, 4, 100)))
    read_s = found.step_s(OFF, OFF, 4, 400, 1000) - found.step_s(OFF, OFF, 4, 400, 0)
    assert read_s == pytest.approx(1000 / model.prefill_tokens_per_s)


def test_a_step_pays_for_what_it_verifies_and_for_what_it_drafts() -> None:
    """The first step with drafts has none to verify, and the last one makes none."""
    found, arm = node(), Arm("eagle3", 7)
    drafting = found.step_s(OFF, arm, 64, 640, 0)
    verifying = found.step_s(arm, OFF, 64, 640, 0)
    plain, both = found.step_s(OFF, OFF, 64, 640, 0), found.step_s(arm, arm, 64, 640, 0)
    assert plain < drafting < both
    assert plain < verifying < both
    assert drafting + verifying == pytest.approx(plain + both)


def test_verified_tokens_are_free_in_small_batches() -> None:
    found, arm = node(), Arm("ngram", 4)
    model = found.engine
    assert found.step_s(arm, OFF, 8, 0, 0) == pytest.approx(model.step)
    assert found.step_s(arm, OFF, 100, 0, 0) > model.step


def test_an_update_has_a_fixed_part_and_all_gpus() -> None:
    emulate = EmulateConfig(hardware="h100")
    assert 0 < update_s(emulate, 8, 0) < update_s(emulate, 8, 100_000)
    assert update_s(emulate, 8, 100_000) < update_s(emulate, 4, 100_000)


def test_a_token_may_stand_for_several() -> None:
    """Engine steps, training and the tokens of an update keep their time, the rest weighs less."""
    one, eight = node(), Node.of(EmulateConfig(hardware="h100", tokens=8).settings)
    assert eight is not None
    assert eight.step_s(OFF, OFF, 4, 0, 10) == one.step_s(OFF, OFF, 4, 0, 10)
    assert eight.step_s(OFF, OFF, 4, 50, 0) == pytest.approx(one.step_s(OFF, OFF, 4, 400, 0))
    assert eight.trainer_tokens_per_s == one.trainer_tokens_per_s
    for part in ("sleep_s", "offload_s", "sync_s", "swap_s", "park_s"):
        assert getattr(eight, part) == pytest.approx(getattr(one, part) / 8), part
    plain, short = (EmulateConfig(hardware="h100", tokens=n) for n in (1, 8))
    assert update_s(short, 8, 0) == pytest.approx(update_s(plain, 8, 0) / 8)
    per_token = [update_s(each, 8, 1000) - update_s(each, 8, 0) for each in (plain, short)]
    assert per_token[0] == pytest.approx(per_token[1])


def test_the_label_says_what_is_emulated() -> None:
    emulate = EmulateConfig(hardware="h100")
    assert emulate.label(8) == "emulated: 8 H100s, qwen2.5-7b"
    short = EmulateConfig(hardware="h100", tokens=8)
    assert short.label(1) == "emulated: 1 H100, qwen2.5-7b, 1 token for 8"
    assert EmulateConfig().label(8) == ""
