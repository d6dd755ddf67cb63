"""The memory plan: what fits where, and refusals whose advice works."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_folders import SHAPES
from tlt.cli.main import app
from tlt.config.load import load_config
from tlt.config.train import NodeConfig, TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.train.memory import GIB, Place
from tlt.train.preflight import check_outline
from tlt.train.shape import ModelShape

CONFIGS = Path(__file__).parents[3] / "configs"
NODE = ("node.num_gpus=8", "node.gpu_gib=79", "node.host_gib=1900")
WITHOUT_TLT = ("tlt.enabled=false", "engine.strategy.kind=off", "capture.enabled=true")
"""Without a drafter, whose parts have tests of their own."""
RECIPES = SEVEN, THIRTY_TWO = "qwen2_5_7b_math_8gpu", "qwen2_5_32b_math_4nodes"


def arguments(tmp_path: Path, recipe: str, *overrides: str) -> list[str]:
    """Return overrides for the recipe with a model folder that holds only a config.json."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(SHAPES.get(recipe.partition("_math")[0], SHAPES["qwen3_4b"]))
    )
    own = [f"policy.model={folder}", f"run.out={tmp_path / 'run'}"]
    return [*own, *NODE, *WITHOUT_TLT, *overrides]


def plan(tmp_path: Path, recipe: str, *overrides: str) -> dict[str, Place]:
    given = arguments(tmp_path, recipe, *overrides)
    config = resolve_defaults(load_config(TrainConfig, CONFIGS / f"{recipe}.toml", given))
    places = check_outline(config)
    assert places is not None
    return {place.name: place for place in places}


def gib(place: Place, part: str) -> float:
    return dict(place.parts)[part] / GIB


def test_all_experts_are_weights_and_those_of_a_token_are_activations(tmp_path: Path) -> None:
    model = SHAPES["qwen3_30b_a3b"]
    shape = ModelShape.of(model)
    fewer = ModelShape.of(model | {"num_experts": 64})
    dense = ModelShape.of({k: v for k, v in model.items() if k != "num_experts"})
    assert shape.parameters - fewer.parameters == pytest.approx(48 * 64 * 3 * 2048 * 768, rel=1e-3)
    assert shape.width == dense.width == 6144
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    given = [f"policy.model={folder}", f"run.out={tmp_path / 'run'}", *WITHOUT_TLT]
    node = ["node.num_gpus=8", "node.gpu_gib=180", "node.host_gib=3000"]
    config = load_config(TrainConfig, CONFIGS / f"{THIRTY_TWO}.toml", [*given, *node])
    places = check_outline(resolve_defaults(config))
    assert places is not None
    generating = next(place for place in places if place.name == "a GPU, generating")
    gpus = config.engine.num_gpus
    assert gib(generating, "policy") == pytest.approx(2 * 30.5e9 / gpus / GIB, rel=0.01)


def test_the_7b_recipe_fits_and_every_part_has_its_size(tmp_path: Path) -> None:
    places = plan(tmp_path, SEVEN)
    assert all(place.fits for place in places.values())
    generating = places["a GPU, generating"]
    assert gib(generating, "policy") == pytest.approx(15.2e9 / GIB, rel=0.01)
    assert gib(generating, "learner at rest") == pytest.approx(1 + 12 * 7.6e9 / 8 / GIB, rel=0.02)
    engine = sum(size for name, size in generating.parts if name != "learner at rest")
    assert engine / GIB == pytest.approx(0.65 * 79, rel=0.001)
    assert 20 < gib(places["a GPU, update"], "learner") < 40
    start = places["host, start"]
    assert gib(start, "ranks load the policy in float32") == pytest.approx(8 * 30.4e9 / GIB, 0.01)
    # Two rows of 18,432 tokens of every rank, in pinned memory.
    way = gib(places["host, running"], "captured states on their way")
    assert way == pytest.approx(8 * 2 * 2 * 18432 * 8 * 3584 / GIB, rel=0.01)


def test_lora_needs_no_gradients_and_moments_of_the_policy(tmp_path: Path) -> None:
    """Rank 16 on all linear layers of the 7B model: 28 layers of 1.44 million parameters."""
    adapter, policy = 28 * 16 * 90112, 7.6e9
    places = plan(tmp_path, SEVEN, "learner.lora.rank=16", "algorithm.kl_weight=0.1")
    resting = gib(places["a GPU, generating"], "learner at rest")
    assert resting == pytest.approx(1 + (2 * policy + 12 * adapter) / 8 / GIB, rel=0.01)
    running, start = places["host, running"], places["host, start"]
    saved = gib(running, "checkpoint on its way to disk")
    assert saved == pytest.approx(12 * adapter / GIB, rel=0.01)
    loading = gib(start, "ranks load the policy in bfloat16")
    assert loading == pytest.approx(8 * 2 * policy / GIB, rel=0.01)
    two = ("learner.lora.rank=16", "learner.lora.target_modules=['q_proj', 'v_proj']")
    fewer = plan(tmp_path, SEVEN, *two)["a GPU, update"].need
    assert fewer < places["a GPU, update"].need < plan(tmp_path, SEVEN)["a GPU, update"].need


def test_engines_and_ranks_of_separate_nodes_are_not_added_up(tmp_path: Path) -> None:
    places = plan(tmp_path, THIRTY_TWO)
    assert all(place.fits for place in places.values())
    start = places["host, start"]
    assert gib(start, "ranks load the policy in float32") == pytest.approx(8 * 131e9 / GIB, 0.01)
    assert "learner at rest" not in dict(places["a GPU, generating"].parts)


def test_a_kv_cache_shrinks_with_tensor_parallelism(tmp_path: Path) -> None:
    notes = []
    for gpus in (2, 4):
        ranks = f"learner.num_ranks={32 - 4 * gpus}"
        places = plan(tmp_path, THIRTY_TWO, f"engine.num_gpus={gpus}", ranks)
        found = re.search(r"([\d,]+) tokens", places["a GPU, generating"].note)
        assert found is not None
        notes.append(int(found[1].replace(",", "")))
    assert notes[1] > 2 * notes[0]


def test_engines_that_drop_their_policy_keep_none_on_the_host(tmp_path: Path) -> None:
    """Only while the learner starts, and where harvest sends engines to sleep in a rollout."""
    part = "weights of sleeping engines"
    found = {}
    for harvest in ("true", "false"):
        tlt = ("tlt.enabled=true", f"tlt.harvest={harvest}")
        for recipe in RECIPES:
            places = plan(tmp_path, recipe, *tlt)
            hosts = places["host, start"], places["host, running"]
            found[recipe, harvest] = [part in dict(host.parts) for host in hosts]
    assert found == {
        (SEVEN, "true"): [True, True],
        (SEVEN, "false"): [True, False],
        (THIRTY_TWO, "true"): [False, True],
        (THIRTY_TWO, "false"): [False, False],
    }


def test_catch_up_takes_its_memory_from_the_kv_cache(tmp_path: Path) -> None:
    places = [
        plan(tmp_path, SEVEN, "tlt.enabled=true", f"engine.drafter_state_mib={mib}")
        for mib in (0, 1024)
    ]
    before, after = (place["a GPU, generating"] for place in places)
    assert gib(after, "drafter's catch-up") == 1
    assert gib(before, "KV cache") - gib(after, "KV cache") == pytest.approx(1)
    assert before.need == after.need


def test_the_trainer_has_room_for_the_passes_of_the_longest_draft(tmp_path: Path) -> None:
    def trainer(*overrides: str) -> float:
        places = plan(tmp_path, SEVEN, "tlt.enabled=true", *overrides)
        return gib(places["a GPU, harvest"], "drafter's trainer")

    seven = trainer("engine.strategy.kind=adaptive")
    assert seven == trainer("engine.strategy.kind=off", "tlt.num_draft_tokens=7")
    four = trainer("engine.strategy.kind=adaptive", "tlt.num_draft_tokens=4")
    assert four == trainer("engine.strategy={kind='off'}", "tlt.num_draft_tokens=4")
    # 4,096 tokens, with the logits of 32,768 draft tokens three times.
    assert seven - four == pytest.approx(3 * 4 * 4096 * (3 * 32768 + 20 * 3584) / GIB)


def test_engines_record_states_where_the_plan_has_room(tmp_path: Path) -> None:
    """Twice the tokens of the KV cache, and two engine steps in pinned memory."""
    recorded = "hidden states of running samples"
    places = plan(tmp_path, SEVEN, "tlt.enabled=true")
    note = re.search(r"([\d,]+) tokens", places["a GPU, generating"].note)
    assert note is not None
    tokens = 2 * int(note[1].replace(",", "")) + 2 * 2 * 16384
    expected = 8 * tokens * 8 * 3584 / GIB
    assert gib(places["host, running"], recorded) == pytest.approx(expected, rel=0.01)
    one_step = gib(places["a GPU, generating"], "hidden states of one engine step")
    assert one_step == pytest.approx(16384 * 8 * 3584 / GIB)
    assert "captured states on their way" not in dict(places["host, running"].parts)
    by_learner = plan(tmp_path, SEVEN, "tlt.enabled=true", "capture.by=learner")
    assert recorded not in dict(by_learner["host, running"].parts)


def test_engines_on_cpu_cores_record_twice_the_tokens_of_their_cache(tmp_path: Path) -> None:
    needs = []
    for cache in (1, 2):
        (place,) = plan(
            tmp_path, "tiny_tail_cpu", "tlt.enabled=true", f"engine.kv_cache_gib={cache}"
        ).values()
        needs.append(gib(place, "hidden states of running samples"))
    # 36 layers of 8 key-value heads and the drafter's, of 128 floats each; two engines.
    assert needs[1] - needs[0] == pytest.approx(2 * 2 * 8 * 2560 / (2 * 8 * 128 * 4 * 37), rel=0.01)


REFUSED = {
    "engine too large": (SEVEN, ["engine.engine_args.gpu_memory_utilization=0.9"]),
    "no KV cache": (SEVEN, ["engine.engine_args.gpu_memory_utilization=0.2"]),
    "one GPU for 32B": (THIRTY_TWO, ["engine.num_gpus=1"]),
    "activations": (SEVEN, ["learner.gradient_checkpointing=false"]),
    "rows longer than any sample": (SEVEN, ["learner.row_tokens=262144"]),
    "one GPU for 7B": (SEVEN, ["pool.num_engines=1", "learner.num_ranks=1"]),
    "engines beside large ranks": (
        SEVEN, ["pool.num_engines=2", "learner.num_ranks=2", "learner.row_tokens=2048",
                "node.gpu_gib=90", "sampling.max_tokens=1024",
                "engine.engine_args.max_model_len=2048"],
    ),
    "many tokens": (
        THIRTY_TWO, ["sampling.max_tokens=120000", "engine.engine_args.max_model_len=122200"],
    ),
    "drafter of all tokens": (
        SEVEN, ["tlt.enabled=true", "tlt.draft_vocab_size=152064", "node.gpu_gib=58",
                "engine.engine_args.gpu_memory_utilization=0.6",
                "engine.engine_args.max_num_seqs=16", "tlt.row_tokens=8192"],
    ),
    "captured states": (SEVEN, ["capture.capacity_gib=300", "node.host_gib=420"]),
    "states of running samples": (SEVEN, ["tlt.enabled=true", "node.host_gib=440"]),
    "CPU engines": ("tiny_tail_cpu", ["engine.kv_cache_gib=1000", "node.host_gib=300"]),
    "loading": (THIRTY_TWO, ["node.host_gib=900"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_the_advice_works(tmp_path: Path, name: str) -> None:
    recipe, overrides = REFUSED[name]
    with pytest.raises(ConfigError) as refusal:
        plan(tmp_path, recipe, *overrides)
    message = str(refusal.value)
    advice = message.partition("; ")[2]
    if name == "loading":
        assert re.search(r"\d+ GiB \(node\.host_gib\)", advice)
        return
    assert advised(advice), message
    plan(tmp_path, recipe, *overrides, *advised(advice))


def advised(text: str) -> list[str]:
    """Return the settings that a message advises, as overrides."""
    return [f"{key}={value}" for key, value in re.findall(r"(\w+(?:\.\w+)+) = ([\w.]+)", text)]


def test_without_a_description_there_is_a_plan_but_no_verdict(tmp_path: Path) -> None:
    given = [a for a in arguments(tmp_path, SEVEN) if not a.startswith("node.")]
    config = load_config(TrainConfig, CONFIGS / f"{SEVEN}.toml", given)
    config = config.model_copy(update={"node": NodeConfig()})
    places = check_outline(resolve_defaults(config))
    assert places is not None
    for place in places:
        assert place.need > GIB


def test_check_prints_the_plan_of_a_folder_without_weights(tmp_path: Path) -> None:
    command = ["train", str(CONFIGS / f"{SEVEN}.toml"), "--check", *arguments(tmp_path, SEVEN)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "only planned" in result.output
    for words in ("a GPU, generating", "a GPU, update", "host, start", "KV cache"):
        assert words in result.output
    assert "VLLM_BATCH_INVARIANT=1" in result.output
    invariant = CliRunner().invoke(app, command, env={"VLLM_BATCH_INVARIANT": "1"})
    assert "VLLM_BATCH_INVARIANT" not in invariant.output


def test_another_file_in_the_folder_makes_it_a_model_to_be_checked(tmp_path: Path) -> None:
    given = arguments(tmp_path, SEVEN)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert check_outline(load_config(TrainConfig, CONFIGS / f"{SEVEN}.toml", given)) is None
