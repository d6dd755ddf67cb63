"""A training recipe as the scenario of a simulation."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from tlt.config.load import check, read_toml
from tlt.errors import ConfigError
from tlt.simulate.recipe import scenario_tree
from tlt.simulate.scenario import ScenarioConfig, cluster_of, mode_of, num_nodes
from tlt.timing.profiles import NEW_DRAFTER

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results"


def scenario(name: str, *changes: str, gpus: int | None = None) -> ScenarioConfig:
    tree: dict[str, Any] = read_toml(CONFIGS / f"{name}.toml") if name else {}
    return check(ScenarioConfig, scenario_tree(tree, changes, name, gpus), name)


def test_a_recipe_brings_its_cluster_and_its_samples() -> None:
    found = scenario("qwen2_5_7b_math_8gpu")
    assert found.cluster.model == "qwen2.5-7b"
    assert (found.cluster.num_engines, found.cluster.tensor_parallel) == (8, 1)
    assert (found.workload.prompts_per_step, found.workload.group_size) == (64, 16)
    assert found.workload.lengths.longest == 16384
    assert found.draft_tokens == [1, 3, 7]
    assert found.cluster.transport == "ipc"
    through_hosts = scenario("qwen2_5_7b_math_8gpu", 'placement.weights="shared_memory"')
    assert through_hosts.cluster.transport == "shared_memory"


def test_a_recipe_without_a_drafter_begins_without_one() -> None:
    """Otherwise the answer credits TLT with a drafter that the run must first train."""
    found = scenario("qwen2_5_7b_math_8gpu")
    assert found.modes == ["off", "tlt"]
    assert found.drafter.start_power == NEW_DRAFTER
    calibrated = scenario("qwen2_5_7b_math_8gpu", 'cluster.calibration="calibration.json"')
    assert calibrated.modes == ["off", "static", "ngram", "tlt"]
    assert calibrated.static_drafter == "ngram"
    given = scenario("qwen2_5_7b_math_8gpu", 'engine.drafter="models/drafter"')
    assert given.modes == ["off", "static", "frozen", "tlt"]
    assert given.drafter.start_power == 1


def test_a_new_drafter_is_as_bad_as_measured() -> None:
    found = json.loads((RESULTS / "drafter" / "report.json").read_text())["acceptance"]
    before, after = (found[when]["1"]["by_position"][0] for when in ("before", "after"))
    assert math.log(before) / math.log(after) == pytest.approx(NEW_DRAFTER, abs=0.5)


def test_gpus_make_engines() -> None:
    name = "qwen2_5_7b_math_8gpu"
    found = scenario(name, gpus=64)
    assert found.cluster.num_engines == 64
    assert num_nodes(found.cluster) == 8
    assert scenario("", "cluster.tensor_parallel=4", gpus=64).cluster.num_engines == 16
    assert scenario(name, "cluster.tensor_parallel=2", gpus=64).cluster.num_engines == 32


def test_a_learner_with_its_own_gpus_keeps_its_share() -> None:
    name, drafter = "qwen2_5_32b_math_4nodes", 'engine.drafter="models/drafter"'
    own, larger = scenario(name, drafter), scenario(name, drafter, gpus=128)
    assert (own.cluster.num_engines, larger.cluster.num_engines) == (4, 16)
    speeds = [cluster_of(each).learner.tokens_per_s for each in (own, larger)]
    assert speeds[1] == pytest.approx(4 * speeds[0])
    assert own.cluster.transport == "nccl"
    assert own.learner.step_s is not None
    assert own.modes == ["off", "static", "frozen"]


def test_changes_reach_the_recipe_and_the_scenario() -> None:
    changes = ("sampling.prompts_per_step=4", "learner.reward_s=3", "num_steps=2")
    own = ("learner.num_ranks=8", "tlt.min_lease_s=30")
    found = scenario("qwen2_5_7b_math_8gpu", *changes, *own)
    assert found.workload.prompts_per_step == 4
    assert found.learner.reward_s == 3
    assert found.num_steps == 2
    mode = mode_of("tlt", found, cluster_of(found).drafting)
    assert mode.harvest is not None
    assert mode.harvest.leases.min_s == 30


def test_a_calibrated_learner_stays_as_it_was() -> None:
    name, calibration = "qwen2_5_32b_math_4nodes", 'cluster.calibration="c.json"'
    drafter = 'engine.drafter="models/drafter"'
    assert scenario(name, drafter).learner.tokens_per_s is not None
    calibrated = scenario(name, drafter, calibration).learner
    assert calibrated.tokens_per_s is calibrated.step_s is None
    set_by_hand = scenario(name, drafter, calibration, "learner.tokens_per_s=5")
    assert set_by_hand.learner.tokens_per_s == 5


def test_short_responses_keep_the_shape_of_the_lengths() -> None:
    lengths = scenario("qwen2_5_7b_math_8gpu", "sampling.max_tokens=6000").workload.lengths
    assert (lengths.median, lengths.p95, lengths.longest) == (1250, 6000, 6000)
    forced = scenario("tiny_tail_cpu", 'cluster.calibration="c.json"').workload.lengths
    assert forced.longest < 6000


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_recipe_is_a_scenario_once_it_is_calibrated(name: str) -> None:
    found = scenario(name, 'cluster.calibration="calibration.json"')
    assert found.cluster.calibration == "calibration.json"


@pytest.mark.parametrize(
    ("name", "changes", "gpus", "says"),
    [
        ("tiny_tail_cpu", (), None, r"policy\.model.*cluster\.calibration="),
        ("tiny_tail_cpu", ('cluster.calibration="c.json"',), 8, r"engine\.num_gpus=1"),
        ("qwen2_5_32b_math_4nodes", (), None, "tlt simulate calibrate"),
        ("qwen2_5_7b_math_8gpu", ("sampling.group_size=1",), None, r"sampling\.group_size"),
        ("qwen2_5_7b_math_8gpu", ("cluster.num_engines=4",), 64, r"cluster\.num_engines"),
        ("", ("cluster.num_engines=4",), 64, r"cluster\.num_engines"),
        ("", ("cluster.tensor_parallel=4",), 2, "--gpus 32"),
    ],
)
def test_what_cannot_be_modelled_is_refused(
    name: str, changes: tuple[str, ...], gpus: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        scenario(name, *changes, gpus=gpus)
