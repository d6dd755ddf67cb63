"""Every shipped recipe loads, and its engines and ranks can be placed."""

import tomllib
from pathlib import Path

import pytest

from tlt.config.load import load_config
from tlt.config.train import TrainConfig
from tlt.train.placement import plan_placement

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(CONFIGS.glob("*.toml"))


def test_there_are_recipes() -> None:
    assert {"tiny_gcd_cpu", "qwen2_5_7b_math_8gpu"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load_and_have_places(path: Path) -> None:
    config = load_config(TrainConfig, path)
    plan = plan_placement(config)
    assert len({*range(config.pool.num_engines), *plan.rank_bundles}) == len(plan.bundles)
    assert len(plan.rank_bundles) == config.learner.num_ranks
    limit = config.engine.engine_args.get("max_model_len")
    if limit is not None:
        assert config.sampling.max_tokens < limit


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_that_did_not_run_say_so(path: Path) -> None:
    on_gpu = tomllib.loads(path.read_text()).get("engine", {}).get("num_gpus", 0) > 0
    assert on_gpu == ("# Not run here: no GPU was available" in path.read_text())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_settings_that_are_commented_out_would_load_too(path: Path) -> None:
    """Check settings that wait for a drafter."""
    lines = path.read_text().splitlines()
    if any(line.startswith("# strategy =") for line in lines):
        lines = [line for line in lines if not line.startswith("strategy =")]
    lines = [
        line[2:] if line.startswith(("# drafter =", "# strategy =")) else line for line in lines
    ]
    tree = tomllib.loads("\n".join(lines))
    config = TrainConfig.model_validate(tree)
    if config.engine.drafter is not None:
        from tlt.config.rollout import EngineConfig
        from tlt.vllm.args import engine_args, max_draft_tokens

        engine = EngineConfig(model=config.policy.model, **config.engine.model_dump())
        engine_args(engine)
        room = config.engine.engine_args["max_model_len"] - config.sampling.max_tokens
        assert room - max_draft_tokens(engine) - 1 >= 2048  # prompt tokens, as the recipes say
