"""The settings of checks are valid on GPUs, too; no engine starts."""

from pathlib import Path

import pytest

from tlt.config.train import TrainConfig, resolve_defaults
from tlt.doctor import training
from tlt.doctor.engines import Place, engine_config, expect_same
from tlt.doctor.report import CHECKS, chosen
from tlt.errors import ConfigError
from tlt.train.placement import plan_placement
from tlt.vllm.args import engine_args

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"


def test_every_check_has_a_claim_and_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert not [c.name for c in CHECKS if not c.function.__doc__ or f"`{c.name}`" not in text]


def test_a_check_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"slep .* start, greedy"):
        chosen(["slep"])
    assert [check.name for check in chosen(["sleep", "start"])] == ["start", "sleep"]
    assert chosen([]) == CHECKS


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_engines_of_checks_have_valid_settings(num_gpus: int, tmp_path: Path) -> None:
    args = engine_args(engine_config(Place(tmp_path, num_gpus)))
    assert args.get("tensor_parallel_size", 1) == 1
    assert ("gpu_memory_utilization" in args) == (num_gpus > 0)


@pytest.mark.parametrize(
    ("num_gpus", "kind", "num_ranks"),
    [(0, "colocated", 1), (1, "colocated", 1), (8, "colocated", 2), (2, "separate", 1)],
)
def test_the_run_has_valid_settings_and_places(
    num_gpus: int, kind: str, num_ranks: int, tmp_path: Path
) -> None:
    settings = training.settings(Place(tmp_path, num_gpus), tmp_path / "run", kind)
    config = resolve_defaults(TrainConfig.model_validate(settings))
    assert config.tlt.harvests
    plan = plan_placement(config)
    assert len(plan.rank_bundles) == num_ranks
    assert sum(bundle.get("GPU", 0) for bundle in plan.bundles) == min(num_gpus, 2)


def test_few_samples_may_differ_on_a_gpu_and_none_on_a_cpu() -> None:
    expected = [(1, 2, 3)] * 8
    one, three = [(1, 2, 9), *expected[1:]], [(9, 2, 3)] * 3 + expected[3:]
    on_gpu, on_cpu = Place(Path("x"), 1), Place(Path("x"), 0)
    assert expect_same(on_cpu, expected, expected, "then") == 0
    assert expect_same(on_gpu, one, expected, "then") == 1
    with pytest.raises(AssertionError, match="3 of 8"):
        expect_same(on_gpu, three, expected, "then")
    with pytest.raises(AssertionError, match="token 2"):
        expect_same(on_cpu, one, expected, "then")
