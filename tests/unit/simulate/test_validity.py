"""What stands beside an answer of the simulator: assumptions and the validated range."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from called import tlt

from tlt.config.load import apply_overrides, check
from tlt.errors import ConfigError
from tlt.simulate.calibrate import Calibration
from tlt.simulate.cluster import Learner
from tlt.simulate.model import Drafting, powers
from tlt.simulate.profiles import h100
from tlt.simulate.scenario import ScenarioConfig, completed
from tlt.simulate.validity import RANGES, VALIDATED, validity

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def scenario(*overrides: str) -> ScenarioConfig:
    return check(ScenarioConfig, apply_overrides({}, overrides), "test")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_comparisons_are_those_of_the_committed_results() -> None:
    tiny, words = VALIDATED
    errors = result("simulator")["step"]
    assert f"off by {errors['median_error']:.0%} in the median" in tiny
    assert f"{errors['worst_error']:.0%} at worst" in tiny
    samples = [8 * int(run["run"].split("-")[1]) for run in result("simulator")["runs"]]
    assert f"{min(samples)} to {max(samples)} samples" in tiny
    assert max(samples) == RANGES["ngram"][1]
    gain = result("simulated_words")["arms"]["tlt"]["end_to_end"]
    measured = gain["measured"]
    assert f"TLT {gain['predicted']:.2f}x end to end, modelled" in words
    assert f"{measured['median']:.2f}x ({measured['median_low']:.2f} to " in words
    assert f"to {measured['median_high']:.2f}), measured" in words
    turns = result("e2e/pairs/words")["turns"]
    _, most_samples, most_tokens = RANGES["eagle3"]
    assert len(turns[0]["lengths"]) == most_samples
    assert f"{most_samples} samples per RL step" in words
    assert max(max(turn["lengths"]) for turn in turns) == most_tokens
    assert f"at most {most_tokens} tokens" in words


def test_an_answer_says_where_it_leaves_the_validated_range() -> None:
    found = validity(scenario("cluster.num_engines=64"))
    assert found.outside[:3] == ("GPUs", "64 engines", "8 nodes")
    engines, samples, tokens = RANGES["eagle3"]
    small = (
        f"cluster.num_engines={engines}",
        f"workload={{prompts_per_step=1, group_size={samples}}}",
        f"workload.lengths={{median=30, p95=200, longest={tokens}}}",
    )
    assert validity(scenario(*small)).outside == ("GPUs",)
    for change, says in (
        ("workload.group_size=17", "17 samples per RL step"),
        ("cluster.engine_deaths_per_hour=1", "engines that die"),
        ("drafter.start_power=17", "a run that begins without a drafter"),
    ):
        assert validity(scenario(*small, change)).outside == ("GPUs", says)


def test_gpus_of_calibrated_runs_are_beyond_the_comparisons(tmp_path: Path) -> None:
    measured = Calibration(
        h100(1e9, 1e4, 1), Drafting({"ngram": powers(0.3)}), Learner(100.0), 50.0
    )
    small = ("cluster.num_engines=2", "workload={prompts_per_step=8, group_size=16}")
    lengths = "workload.lengths={median=30, p95=600, longest=1800}"
    for num_gpus, outside in ((0, ()), (1, ("GPUs",))):
        path = tmp_path / f"{num_gpus}.json"
        replace(measured, num_gpus=num_gpus).save(path)
        found = scenario(*small, lengths, f'cluster.calibration="{path}"')
        assert validity(found).outside == outside


def test_modes_without_a_measured_acceptance_are_refused(tmp_path: Path) -> None:
    """Otherwise an unknown acceptance counts as none, and TLT beats an arm that nobody tried."""
    for unknown in (
        ['modes=["off", "ngram"]'],
        ['modes=["off", "static"]', 'static_drafter="ngram"'],
    ):
        with pytest.raises(ConfigError, match=r"^modes"):
            completed(scenario(*unknown))
    measured = Calibration(
        h100(1e9, 1e4, 1), Drafting({"ngram": powers(0.3)}), Learner(100.0), 50.0
    )
    measured.save(tmp_path / "c.json")
    from_nothing = (
        f'cluster.calibration="{tmp_path / "c.json"}"',
        'modes=["off", "tlt"]',
        "drafter.start_power=17",
    )
    with pytest.raises(ConfigError, match=r"drafter\.acceptance=0\.7"):
        completed(scenario(*from_nothing))
    completed(scenario(*from_nothing, "drafter.acceptance=0.7"))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tensor_parallel=2"):
        validity(scenario('cluster.model="llama-3-70b"'))
    validity(scenario('cluster.model="llama-3-70b"', "cluster.tensor_parallel=2"))


def test_assumptions_follow_the_settings() -> None:
    told = "\n".join(
        validity(
            scenario("cluster.num_engines=64", "learner.trained_share=0.5", "drafter.drift=0.01")
        ).lines()
    )
    assert "qwen2.5-7b, 1 H100 per engine" in told
    assert "+0.0100 with every policy update" in told
    assert "trains on 50% of the tokens" in told
    assert "a weight sync of 4.9 s, for 8 nodes" in told


def test_terminal_and_json_say_it(tmp_path: Path) -> None:
    few = ["num_steps=1", 'modes=["off", "frozen"]', "cluster.num_engines=1", "draft_tokens=[2]"]
    few += ["workload.prompts_per_step=1", "--out", str(tmp_path)]
    code, shown, _ = tlt("simulate", *few, "--no-plot")
    shown = " ".join(shown.split())
    assert code == 0
    assert "Modelled: TLT without harvest would run" in shown
    assert "assumed: engine steps of qwen2.5-7b" in shown
    assert "compared with runs: SmolLM2 with an EAGLE-3 drafter" in shown
    assert "beyond these comparisons: GPUs;" in shown
    (found,) = json.loads(tlt("simulate", *few, "--json")[1])
    assert found["modelled"] is True
    assert found["validated"] == list(VALIDATED)
    assert found["assumptions"]
    assert found["outside"][0] == "GPUs"


def test_a_sweep_says_which_point_assumes_what(tmp_path: Path) -> None:
    few = ["num_steps=1", 'modes=["off", "frozen"]', "draft_tokens=[2]"]
    few += ["workload.prompts_per_step=1", "--out", str(tmp_path)]
    code, shown, errors = tlt("simulate", *few, "--sweep", "cluster.num_engines=1,16")
    assert code == 0, errors
    shown = " ".join(shown.split())
    assert "cluster.num_engines=1: assumed: a weight sync of 0.6 s, for 1 node:" in shown
    assert "cluster.num_engines=16: assumed: a weight sync of 1.2 s, for 2 nodes:" in shown
    assert shown.count("assumed: engine steps of qwen2.5-7b") == 1
    found = json.loads((tmp_path / "simulation.json").read_text())
    assert [result["fixed_arm"] for result in found] == [None, None]


def test_an_empty_file_is_no_scenario(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("")
    code, _, errors = tlt("simulate", str(tmp_path / "s.toml"), "--json", "--out", str(tmp_path))
    assert code == 2
    assert "s.toml is empty; name the TOML file of a scenario" in " ".join(errors.split())
