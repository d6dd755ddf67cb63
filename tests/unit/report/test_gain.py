"""The gain of one run over another: more than noise or not, and what made it."""

import math
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest
from made_up import made_up_folder

from tlt.report.gain import Gain, Ratio, compare, drafting, gain, interval, leases, verdict
from tlt.report.view import look_at

ARMS = (("off", 2.0, 16, 600, 0), ("ngram:3", 3.0, 4, 300, 100), ("eagle3:4", 3.0, 1, 400, 300))


def measured(step: Ratio, update: float = 1.0, num_pairs: int = 9) -> Gain:
    return Gain(num_pairs, step, step, step, Ratio(update, update, update), update, 6.0, 4.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (measured(Ratio(1.5, 1.3, 1.7)), "TLT made RL steps 1.50x as fast"),
        (measured(Ratio(1.1, 0.9, 1.3)), "within noise"),
        (measured(Ratio(1.1, 1.05, 1.2), update=1.2), "within noise"),
        (measured(Ratio(1.5, 1.3, 1.7), num_pairs=2), "Too few RL steps"),
        (measured(Ratio(0.8, 0.7, 0.9)), "slower here"),
        (None, "no RL step to compare"),
    ],
)
def test_a_gain_counts_only_if_noise_does_not_explain_it(found: Gain | None, words: str) -> None:
    assert words in verdict(found)


def test_two_runs_are_compared_without_their_first_step(tmp_path: Path) -> None:
    off = look_at(made_up_folder(tmp_path / "off", steps=5))
    tlt = look_at(made_up_folder(tmp_path / "tlt", steps=4, time__rollout_s=5.0))
    off.records[0]["time/step_s"] = 1e6  # loads and compiles
    found = gain(off, tlt)
    assert found is not None
    assert found.num_pairs == 3
    assert found.rollout == Ratio(2.0, 2.0, 2.0)
    assert found.update == Ratio(1.0, 1.0, 1.0)
    assert found.step.median == pytest.approx(13.7 / 8.7)
    assert found.is_clear
    told = compare(off, tlt)
    assert (told["steps"], told["step"]) == (4, asdict(found.step))
    assert told["rollout_per_token"]["median"] == pytest.approx(2.0)
    assert told["whole"] == pytest.approx((1e6 + 3 * 13.7) / (4 * 8.7))
    tlt.records[2]["time/rollout_s"] = math.nan
    assert compare(off, tlt)["rollout"]["median"] == pytest.approx(2.0)
    del off.records[1:]
    assert gain(off, tlt) is None


def test_an_emulated_gain_is_held_against_late_work_not_against_updates(tmp_path: Path) -> None:
    config = {"emulate": {"hardware": "h100"}}
    off = look_at(made_up_folder(tmp_path / "off", config=config))
    tlt = look_at(
        made_up_folder(
            tmp_path / "tlt", config=config, time__update_s=0.1, time__rollout_s=9.0,
            emulate__late_s_share=0.01,
        )
    )  # fmt: skip
    found = gain(off, tlt)
    assert found is not None
    assert found.drift == pytest.approx(0.99)
    assert found.is_clear
    for record in off.records:
        record["emulate/late_s_share"] = 0.4
    found = gain(off, tlt)
    assert found is not None
    assert not found.is_clear


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    values = [float(n % 10) for n in range(400)]  # standard error 2.87 / 20
    low, high = interval(fmean, values, 500)
    assert 4.1 < low < 4.3 < 4.7 < high < 4.9
    assert interval(fmean, values, 500) == (low, high)
    assert interval(fmean, [2.0] * 5, 50) == (2.0, 2.0)


def test_every_drafter_gets_its_share(tmp_path: Path) -> None:
    view = look_at(made_up_folder(tmp_path / "run", arms=ARMS, steps=1))
    found = drafting(view)
    assert list(found) == ["off", "ngram", "eagle3"]
    assert found["ngram"]["saved_share"] == 0.25
    assert found["eagle3"]["saved_share"] == 0.75
    assert found["eagle3"]["acceptance_length"] == 4.0
    assert found["off"]["tokens"] == 1200  # both engines


def test_leases_are_those_of_harvest(tmp_path: Path) -> None:
    plain = look_at(made_up_folder(tmp_path / "plain"))
    assert leases(plain) == {}
    run = made_up_folder(
        tmp_path / "run", config={"tlt": {"enabled": True}}, steps=2, harvest__used_s=4.0,
        harvest__published=1, harvest__held_out_length=1.7,
    )  # fmt: skip
    found = leases(look_at(run))
    assert found["published"] == 2
    assert found["held_out_length"] == 1.7
    assert found["training_s"] == 10.0
