"""The checks exist, and their settings for GPUs are valid; no engine starts."""

from importlib import import_module
from pathlib import Path

import pytest

from tlt.config.train import TrainConfig, resolve_defaults
from tlt.doctor import training
from tlt.doctor.checks import CHECKS
from tlt.doctor.engines import engine_config, expect_same
from tlt.doctor.isolated import Check
from tlt.doctor.place import Place
from tlt.doctor.report import MODELS
from tlt.train.placement import plan_placement
from tlt.vllm.args import engine_args

PAGE = Path(__file__).parents[3] / "docs" / "gpu-hour.md"


@pytest.mark.parametrize("check", [MODELS, *CHECKS], ids=lambda check: check.name)
def test_a_check_is_a_function_and_is_on_the_page(check: Check) -> None:
    module, _, name = check.target.partition(":")
    assert getattr(import_module(module), name).__doc__
    assert check is MODELS or f"`{check.name}`" in PAGE.read_text()


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_engines_of_checks_have_valid_settings(num_gpus: int, tmp_path: Path) -> None:
    place = Place(str(tmp_path), num_gpus)
    args = engine_args(engine_config(place))
    assert args.get("tensor_parallel_size", 1) == 1
    assert ("gpu_memory_utilization" in args) == (num_gpus > 0)


@pytest.mark.parametrize(
    ("num_gpus", "kind", "num_ranks"),
    [(0, "colocated", 1), (1, "colocated", 1), (8, "colocated", 2), (2, "separate", 1)],
)
def test_the_run_has_valid_settings_and_places(
    num_gpus: int, kind: str, num_ranks: int, tmp_path: Path
) -> None:
    settings = training.settings(Place(str(tmp_path), num_gpus), tmp_path / "run", kind)
    config = resolve_defaults(TrainConfig.model_validate(settings))
    assert config.tlt.harvests
    plan = plan_placement(config)
    assert len(plan.rank_bundles) == num_ranks
    assert sum(bundle.get("GPU", 0) for bundle in plan.bundles) == min(num_gpus, 2)


def test_few_samples_may_differ_on_a_gpu_and_none_on_a_cpu() -> None:
    expected = [(1, 2, 3)] * 8
    one, three = [(1, 2, 9), *expected[1:]], [(9, 2, 3)] * 3 + expected[3:]
    on_gpu, on_cpu = Place("x", 1), Place("x", 0)
    assert expect_same(on_cpu, expected, expected, "then") == 0
    assert expect_same(on_gpu, one, expected, "then") == 1
    with pytest.raises(AssertionError, match=r"then: 3 of 8 samples differ, the first in sample 0"):
        expect_same(on_gpu, three, expected, "then")
    with pytest.raises(AssertionError, match=r"at token 2: \[9\] instead of \[3\]"):
        expect_same(on_cpu, one, expected, "then")
