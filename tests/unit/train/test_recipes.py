"""The GPU recipes pass `tlt train --check` with models of their shapes, and say true sizes."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_folders import PARAMETERS, SHAPES, make
from tlt.cli.main import app
from tlt.config.load import load_config
from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.train.memory import Place
from tlt.train.preflight import check_outline
from tlt.train.shape import ModelShape

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(
    path.stem for path in CONFIGS.glob("*.toml") if "no GPU was available" in path.read_text()
)
QUESTION = {"question": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}"}


def model_of(recipe: str) -> str:
    return recipe.partition("_math")[0]


def load(recipe: str, *overrides: str) -> TrainConfig:
    return resolve_defaults(load_config(TrainConfig, CONFIGS / f"{recipe}.toml", overrides))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in SHAPES}


def plan(folder: Path, recipe: str, model: str, *overrides: str) -> dict[str, Place]:
    """Return the memory plan of a recipe with a model."""
    outline = folder / model
    outline.mkdir(exist_ok=True)
    (outline / "config.json").write_text(json.dumps(SHAPES[model]))
    places = check_outline(load(recipe, f"policy.model={outline}", *overrides))
    assert places is not None
    return {place.name: place for place in places}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert ModelShape.of(SHAPES[name]).parameters == pytest.approx(PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_check_passes(recipe: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Everything that `--check` looks at: settings, tokenizer, data, reward, lengths, memory."""
    data = tmp_path / "math.jsonl"
    data.write_text("".join(json.dumps(QUESTION) + "\n" for _ in range(400)))
    settings = [
        f"policy.model={models[model_of(recipe)]}",
        f"task.path={data}",
        f"run.out={tmp_path / 'run'}",
        "capture.capacity_gib=0.01",  # the buffer is reserved on this machine
    ]
    done = CliRunner().invoke(
        app,
        ["train", str(CONFIGS / f"{recipe}.toml"), "--check", *settings],
        env={"COLUMNS": "200"},
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "a GPU, update" in done.stdout
    assert "ok" in done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_comments_say_what_the_plan_says(recipe: str, tmp_path: Path) -> None:
    """The tokens and samples of the KV cache are calculated, in the comment and by `--check`."""
    text = re.sub(r"\n# ", " ", (CONFIGS / f"{recipe}.toml").read_text())
    said = re.search(r"([\d ]+) tokens, or (\d+) samples of full length at once", text)
    assert said
    note = plan(tmp_path, recipe, model_of(recipe))["a GPU, generating"].note
    planned = re.search(r"KV cache of ([\d,]+) tokens, ([\d.]+) samples at once", note)
    assert planned
    tokens, samples = int(planned[1].replace(",", "")), float(planned[2])
    assert int(said[1].replace(" ", "")) == pytest.approx(tokens, rel=0.02)
    assert int(said[2]) == int(samples)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tlt_is_on_with_draft_lengths_that_always_find_a_full_graph(recipe: str) -> None:
    from graph_model import full_share
    from tlt.vllm.args import graph_plan

    config = load(recipe)
    assert config.tlt.enabled
    engine = EngineConfig(model=config.policy.model, **config.engine.model_dump())
    if config.tlt.harvests and engine.drafter is None:
        engine = engine.model_copy(update={"drafter": "made by the run"})
    found = graph_plan(engine)
    assert found is not None
    assert found.query_lens == (1, 2, 4, 8)
    assert full_share(found) == 1.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_tlt_can_be_turned_off(recipe: str, tmp_path: Path) -> None:
    """By the overrides that the recipe names."""
    said = re.search(r"without TLT: (.*)", (CONFIGS / f"{recipe}.toml").read_text())
    assert said
    without = plan(tmp_path, recipe, model_of(recipe), *said[1].split())
    assert "drafter" not in dict(without["a GPU, generating"].parts)


def test_harvest_needs_a_second_engine_and_ranks_on_the_engines_nodes() -> None:
    for recipe in RECIPES:
        config = load(recipe)
        can_learn = config.pool.num_engines > 1 and config.placement.kind == "colocated"
        assert config.tlt.harvests == can_learn, recipe


def test_one_gpu_of_80_gb_trains_4b_and_not_8b(tmp_path: Path) -> None:
    """The recipe's comment says so."""
    recipe = "qwen3_8b_math_1gpu"
    text = (CONFIGS / f"{recipe}.toml").read_text()
    share = re.search(r"node\.gpu_gib=79 (engine\S+)", text)
    assert share
    places = plan(tmp_path, recipe, "qwen3_4b", "node.gpu_gib=79", share[1])
    assert all(place.fits for place in places.values())
    with pytest.raises(ConfigError, match=r"a GPU, update.*learner\.num_ranks = 2"):
        plan(tmp_path, recipe, "qwen3_8b", "node.gpu_gib=79")
