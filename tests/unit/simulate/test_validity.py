"""What stands beside an answer of the simulator: assumptions and the validated range."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from called import tlt

from tlt.config.load import apply_overrides, check
from tlt.simulate.plot import plot_simulation
from tlt.simulate.scenario import ScenarioConfig
from tlt.simulate.validity import ENGINES, SAMPLES, TOKENS, VALIDATED, validity

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
    assert max(samples) == SAMPLES
    gain = result("simulated_words")["arms"]["tlt"]["end_to_end"]
    measured = gain["measured"]
    assert f"TLT {gain['predicted']:.2f}x end to end, modelled" in words
    assert f"{measured['median']:.2f}x ({measured['median_low']:.2f} to " in words
    assert f"to {measured['median_high']:.2f}), measured" in words
    turns = result("e2e/pairs/words")["turns"]
    assert f"{len(turns[0]['lengths'])} samples per RL step" in words
    assert f"at most {max(max(turn['lengths']) for turn in turns)} tokens" in words


def test_an_answer_says_where_it_leaves_the_validated_range() -> None:
    found = validity(scenario("cluster.num_engines=64"))
    assert found.outside[:3] == ("GPUs", "64 engines", "8 nodes")
    small = scenario(
        f"cluster.num_engines={ENGINES}",
        f"workload={{prompts_per_step={SAMPLES // 16}}}",
        f"workload.lengths={{median=30, p95=600, longest={TOKENS}}}",
    )
    assert validity(small).outside == ("GPUs",)


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


def test_the_picture_says_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tlt.pictures import pyplot

    modes = {
        name: {"rollout_s": seconds, "update_s": 1.0, "step_s": seconds + 2.0}
        for name, seconds in {"off": 8.0, "frozen": 5.0, "tlt": 4.0}.items()
    }
    ends = {name: [of["rollout_s"] / 2, of["rollout_s"]] for name, of in modes.items()}
    told = validity(scenario()).lines()
    with pyplot.rc_context({"svg.fonttype": "none"}):
        picture = plot_simulation(ends, modes, {}, told, tmp_path / "simulation.svg")
    shown = picture.read_text()
    assert "Modelled, not measured." in shown
    assert "beyond these comparisons: GPUs;" in shown
    assert "TLT without harvest" in shown
