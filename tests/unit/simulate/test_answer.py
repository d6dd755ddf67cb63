"""An answer of the simulator: its words, its picture, its assumptions and the validated range."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from called import tlt

from tlt.config.load import apply_overrides, check
from tlt.errors import ConfigError
from tlt.simulate.answer import (
    RANGES,
    VALIDATED,
    contributions,
    few_samples,
    figures,
    in_words,
    validity,
)
from tlt.simulate.calibrate import Calibration
from tlt.simulate.cluster import Learner
from tlt.simulate.plot import plot_simulation, what_if
from tlt.simulate.published import nearest
from tlt.simulate.scenario import ScenarioConfig, completed, simulate
from tlt.timing.model import Drafting, powers
from tlt.timing.profiles import BEFORE, MEASURED_CHAIN, h100

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
NGRAMS = Calibration(h100(1e9, 1e4, 1), Drafting({"ngram": powers(0.3)}), Learner(100.0), 50.0)
FEW = ("num_steps=1", 'modes=["off", "frozen"]', "draft_tokens=[2]", "workload.prompts_per_step=1")


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


def test_an_answer_says_where_it_leaves_the_validated_range(tmp_path: Path) -> None:
    found = validity(scenario("cluster.num_engines=64"))
    assert found.outside[:3] == ["GPUs", "64 engines", "8 nodes"]
    engines, samples, tokens = RANGES["eagle3"]
    small = (
        f"cluster.num_engines={engines}",
        f"workload={{prompts_per_step=1, group_size={samples}}}",
        f"workload.lengths={{median=30, p95=200, longest={tokens}}}",
    )
    assert validity(scenario(*small)).outside == ["GPUs"]
    for change, says in (
        ("workload.group_size=17", "17 samples per RL step"),
        ("cluster.engine_deaths_per_hour=1", "engines that die"),
        ("drafter.start_power=17", "a run that begins without a drafter"),
    ):
        assert validity(scenario(*small, change)).outside == ["GPUs", says]
    for num_gpus, outside in ((0, []), (1, ["GPUs"])):
        path = tmp_path / f"{num_gpus}.json"
        replace(NGRAMS, num_gpus=num_gpus).save(path)
        assert validity(scenario(*small, f'cluster.calibration="{path}"')).outside == outside


def test_an_answer_has_the_error_of_the_nearest_published_run(tmp_path: Path) -> None:
    found = validity(scenario("cluster.num_engines=16", "cluster.tensor_parallel=4"))
    assert found.published == [str(case) for case in nearest("qwen2.5-7b", 4, 8)]
    assert f"nearest published run: {found.published[0]}" in found.lines()
    NGRAMS.save(tmp_path / "c.json")
    assert not validity(scenario(f'cluster.calibration="{tmp_path / "c.json"}"')).published


def test_few_samples_per_engine_come_with_a_warning(tmp_path: Path) -> None:
    assert not few_samples(64, 16, 8)
    (warning,) = few_samples(48, 16, 8)
    for says in ("6 for each of 8 engines", "prompts_per_step=4", "num_engines=6"):
        assert says in warning
    few = [*FEW, "--json", "--out", str(tmp_path), "--sweep", "cluster.num_engines=1,4"]
    _, shown, told = tlt("simulate", *few)
    assert [len(point["warnings"]) for point in json.loads(shown)] == [0, 1]
    assert "warning cluster.num_engines=4: 16 samples" in " ".join(told.split())


def test_modes_without_a_measured_acceptance_are_refused(tmp_path: Path) -> None:
    """Otherwise an unknown acceptance counts as none, and TLT beats an arm that nobody tried."""
    for modes in (['modes=["off", "ngram"]'], ['modes=["static"]', 'static_drafter="ngram"']):
        with pytest.raises(ConfigError, match=r"modes: .*cluster\.calibration="):
            completed(scenario(*modes))
    NGRAMS.save(tmp_path / "c.json")
    calibrated = f'cluster.calibration="{tmp_path / "c.json"}"'
    from_nothing = (calibrated, 'modes=["off", "tlt"]', "drafter.start_power=17")
    with pytest.raises(ConfigError, match=r"modes: .*drafter\.acceptance=0\.7"):
        completed(scenario(*from_nothing))
    completed(scenario(*from_nothing, "drafter.acceptance=0.7"))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tensor_parallel=2"):
        validity(scenario('cluster.model="llama-3-70b"'))
    validity(scenario('cluster.model="llama-3-70b"', "cluster.tensor_parallel=2"))


def test_assumptions_follow_the_settings() -> None:
    settings = ("cluster.num_engines=64", "learner.trained_share=0.5", "drafter.drift=0.01")
    told = "\n".join(validity(scenario(*settings)).lines())
    for says in (
        "qwen2.5-7b, 1 H100",
        "+0.0100 with",
        "50% of the tokens",
        "0.60 s, for 8 nodes, by ipc",
    ):
        assert says in told


def test_an_answer_says_that_its_acceptance_is_that_of_trees(tmp_path: Path) -> None:
    def says(*settings: str) -> bool:
        told = validity(scenario(*settings)).lines()
        return any("78% at each" in line and "drafter.acceptance=0.66" in line for line in told)

    assert says()
    assert says("drafter.start_power=17")
    assert not says("drafter.acceptance=0.66")
    NGRAMS.save(tmp_path / "c.json")
    assert not says(f'cluster.calibration="{tmp_path / "c.json"}"')
    (chain,) = (row for row in result("words/rollout")["summary"] if row["mode"] == "eagle3:3")
    measured = chain["acceptance_length"]["median"]
    assert 1 + sum(powers(MEASURED_CHAIN, 3)) == pytest.approx(measured, abs=0.02)
    assert 1 + sum(powers(BEFORE, 64)) == pytest.approx(4.59, abs=0.01)


def test_terminal_and_json_say_it(tmp_path: Path) -> None:
    few = [*FEW, "cluster.num_engines=1", "--out", str(tmp_path)]
    code, shown, _ = tlt("simulate", *few, "--no-plot")
    shown = " ".join(shown.split())
    assert code == 0
    for says in (
        "Modelled: TLT without",
        "assumed: engine",
        "compared with runs: SmolLM2",
        "GPUs;",
    ):
        assert says in shown
    (found,) = json.loads(tlt("simulate", *few, "--json")[1])
    assert found["modelled"] is True
    assert found["validated"] == list(VALIDATED)
    assert found["assumptions"]
    assert found["outside"][0] == "GPUs"


def test_a_sweep_says_which_point_assumes_what(tmp_path: Path) -> None:
    sweep = ["--sweep", "cluster.num_engines=1,16", "--out", str(tmp_path)]
    code, shown, errors = tlt("simulate", *FEW, *sweep)
    assert code == 0, errors
    shown = " ".join(shown.split())
    assert "cluster.num_engines=1: assumed: a weight sync of 0.03 s, for 1 node, by ipc" in shown
    assert "cluster.num_engines=16: assumed: a weight sync of 0.37 s, for 2 nodes, by ipc" in shown
    assert shown.count("assumed: engine steps of qwen2.5-7b") == 1
    found = json.loads((tmp_path / "simulation.json").read_text())
    assert [result["fixed_arm"] for result in found] == [None, None]


def test_a_setting_that_names_a_path_may_come_first(tmp_path: Path) -> None:
    NGRAMS.save(tmp_path / "c.json")
    calibrated = f'cluster.calibration="{tmp_path / "c.json"}"'
    assert tlt("simulate", calibrated, *FEW, "--json", "--out", str(tmp_path))[0] == 0


def test_an_empty_file_is_no_scenario(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("")
    code, _, errors = tlt("simulate", str(tmp_path / "s.toml"), "--json", "--out", str(tmp_path))
    assert code == 2
    assert "s.toml is empty" in " ".join(errors.split())


def test_the_answer_names_the_fixed_arm_and_what_harvest_brings() -> None:
    seconds = {"off": 8.0, "static": 4.0, "frozen": 3.5, "tlt": 3.0}
    found = {
        name: {"step_s": s + 2, "rollout_s": s, "rollout_share": s / (s + 2), "idle_share": 0.4}
        for name, s in seconds.items()
    }
    words = in_words(found, "the best fixed arm, eagle3:4")
    for told in ("2.00x", "1.20x as fast as the best fixed arm, eagle3:4", "1.10x"):
        assert told in words
    assert contributions(found)["harvest"]["rollout"] == pytest.approx(3.5 / 3)
    assert contributions({"off": found["off"]}) == {}
    few = {name: found[name] for name in ("off", "tlt")}
    assert "arvest" not in in_words(few)
    assert "harvest" in in_words(few, from_nothing=True)
    from_ngrams = {"ngram" if name == "frozen" else name: of for name, of in found.items()}
    assert contributions(from_ngrams) == contributions(found)


def test_the_picture_shows_other_engines_drafters_and_tails(tmp_path: Path) -> None:
    config = scenario(
        *("num_steps=2", "cluster.num_engines=4", "workload.prompts_per_step=4"),
        *('modes=["off", "frozen", "tlt"]', "draft_tokens=[3]"),
    )
    ends: dict[str, Any] = {}
    records = simulate(config, lambda name, run: ends.update({name: run.engine_ends}))
    found = {name: figures(of) for name, of in records.items()}
    curves = what_if(config, lambda what, done, total: None)
    engines, drafters, tails = curves.values()
    assert [value for value, _ in engines] == [1, 2, 4, 8, 16]
    assert drafters[-1][1]["tlt"] > drafters[0][1]["tlt"]
    assert tails[-1][1]["tlt"] > tails[0][1]["tlt"]
    told = validity(config).lines()
    shown = plot_simulation(ends, found, curves, told, tmp_path / "simulation.svg").read_text()
    for says in ("Modelled, not measured.", "beyond these comparisons: GPUs;", "without harvest"):
        assert says in shown
    (tmp_path / "lengths.jsonl").write_text('{"step": 1, "tokens": [5, 9]}\n')
    traced = scenario(*FEW, f'workload.trace="{tmp_path / "lengths.jsonl"}"')
    assert len(what_if(traced, lambda what, done, total: None)) == 2, "a trace has its own tail"
