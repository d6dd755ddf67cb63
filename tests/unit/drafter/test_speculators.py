"""Drafters in the speculators format: read, written, and the same as before."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from drafter_fixtures import CONFIG, captured, drafter, trainer_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from tlt.drafter.checkpoint import (  # noqa: E402
    VersionStore,
    adopt,
    load_drafter,
    read_moments,
    save_drafter,
)
from tlt.drafter.eagle3.config import Eagle3Config, Llama3Rope  # noqa: E402
from tlt.drafter.eagle3.model import Eagle3Drafter, frequencies  # noqa: E402
from tlt.drafter.export import ExportPlan, export  # noqa: E402
from tlt.drafter.passes import Row  # noqa: E402
from tlt.drafter.speculators import plain_config, speculators_config  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402

ROPE = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
FORMS = {
    "plain": CONFIG,
    "all tokens": replace(CONFIG, draft_vocab_size=CONFIG.vocab_size),
    "as of Qwen3": replace(CONFIG, norm_before_residual=True, qk_norm=True),
    "as of gpt-oss": replace(CONFIG, norm_before_residual=True, norm_before_fc=True),
    "as of Llama 3": replace(CONFIG, norm_before_residual=True, rope_scaling=ROPE),
    "EAGLE 3.1": replace(CONFIG, fc_norm=True, norm_output=True),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a folder with the config of the model that the drafters fit."""
    folder = tmp_path / "policy"
    folder.mkdir()
    said: dict[str, Any] = {"hidden_size": CONFIG.hidden_size, "vocab_size": CONFIG.vocab_size}
    said |= {"num_hidden_layers": 8, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def exported(source: Path, target: Path, out: Path, **options: Any) -> Path:
    export(ExportPlan(source=source, target=target, out=out, **options))
    return out


def for_others(config: Eagle3Config) -> dict[str, Any]:
    return speculators_config(config, "float32", "owner/policy", ["LlamaForCausalLM"], 5)


def made(config: Eagle3Config) -> Eagle3Drafter:
    torch.manual_seed(0)
    model = Eagle3Drafter(config)
    if not config.drafts_all_tokens:
        model.set_draft_vocabulary(torch.arange(0, 40, 2))
    return model


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_there_and_back_every_bit_is_the_same(
    config: Eagle3Config, dtype: Any, target: Path, tmp_path: Path
) -> None:
    plain = save_drafter(made(config), tmp_path / "plain", dtype)
    shared = exported(plain, target, tmp_path / "shared", format="speculators")
    back = exported(shared, target, tmp_path / "back")
    assert (back / "config.json").read_text() == (plain / "config.json").read_text()
    before, after = (load_file(folder / "model.safetensors") for folder in (plain, back))
    assert before.keys() == after.keys()
    assert all(tensor.dtype == after[name].dtype for name, tensor in before.items())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert load_drafter(shared).config == config
    tensors = load_file(shared / "model.safetensors")
    if not config.drafts_all_tokens:
        assert tensors["t2d"].nonzero()[:, 0].tolist() == list(range(0, 40, 2))
    assert not [name for name in tensors if name.startswith("midlayer")]


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_vllm_reads_the_same_from_it(config: Eagle3Config) -> None:
    pytest.importorskip("vllm")
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    said = for_others(config)
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(said)
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 5}
    model = "Qwen3" if config.qk_norm else "Llama"
    found = SpeculatorsConfig.extract_transformers_pre_trained_config(json.loads(json.dumps(said)))
    assert found["architectures"] == [f"Eagle3{model}ForCausalLM"]
    assert Eagle3Config.from_hf(found) == config
    assert SpeculatorsConfig(**found).hidden_size == config.hidden_size


# --- reading what others wrote --------------------------------------------------------------------


def published(folder: Path, config: Eagle3Config, **changes: Any) -> Path:
    """Write a drafter as others publish it, with the policy's embedding and an unsorted head."""
    folder.mkdir()
    said = for_others(config) | changes
    (folder / "config.json").write_text(json.dumps(said))
    order = torch.randperm(config.draft_vocab_size, generator=torch.Generator().manual_seed(1))
    model = made(config)
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
    tensors["d2t"] = model.draft_token_ids()[order] - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    tensors["t2d"][model.draft_token_ids()] = True
    tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    tensors["verifier_norm.weight"] = torch.ones(config.hidden_size)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_published_drafter_becomes_the_runs_own(tmp_path: Path) -> None:
    config = FORMS["as of gpt-oss"]
    source = published(tmp_path / "hub", config, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ConfigError, match="tlt drafter export"):
        load_drafter(source)
    own = adopt(source, tmp_path / "own", torch.float32, num_target_layers=36)
    loaded, expected = load_drafter(own), made(config)
    assert loaded.config == replace(config, aux_layer_ids=(2, 18, 33))  # vLLM's default
    assert loaded.draft_token_ids().tolist() == list(range(0, 40, 2))
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in expected.state_dict().items())


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    whole = published(tmp_path / "whole", CONFIG)
    tensors = sorted(load_file(whole / "model.safetensors").items())
    (whole / "model.safetensors").unlink()
    save_file(dict(tensors[:5]), whole / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[5:]), whole / "model-00002-of-00002.safetensors")
    assert torch.equal(load_drafter(whole).fc.weight, made(CONFIG).fc.weight)


def test_older_names_of_settings_are_read() -> None:
    said = CONFIG.to_hf("float32")
    for name in ("head_dim", "rope_parameters", "eagle_aux_hidden_state_layer_ids"):
        del said[name]
    said["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    said["rope_scaling"] = {"type": "llama3", **asdict(ROPE)}
    assert Eagle3Config.from_hf(said) == replace(CONFIG, rope_scaling=ROPE)
    absent = for_others(CONFIG)
    del absent["norm_before_residual"]
    assert Eagle3Config.from_hf(plain_config(absent)).norm_before_residual  # vLLM's default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculators_model_type", "dflash"),
        ("num_hidden_layers", 2),
        ("model_type", "gemma3"),
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("target_hidden_size", 64),
    ],
)
def test_other_forms_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    source = published(tmp_path / "hub", CONFIG)
    said = json.loads((source / "config.json").read_text())
    (said if name in said else said["transformer_layer_config"])[name] = value
    (source / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="tlt drafter train") as refused:
        load_drafter(source)
    assert ("yarn" if name == "rope_parameters" else f"{name} = ") in str(refused.value)


@pytest.mark.parametrize("d2t", [[0] * 19 + [40], [-1] * 20, [1, 0] + [0] * 18])
def test_a_vocabulary_that_leads_nowhere_is_refused(d2t: list[int], tmp_path: Path) -> None:
    source = published(tmp_path / "hub", CONFIG)
    tensors = load_file(source / "model.safetensors") | {"d2t": torch.tensor(d2t)}
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t"):
        load_drafter(source)


# --- computing what others trained ----------------------------------------------------------------


def test_the_stretched_rotary_embedding_is_that_of_llama_3() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = Llama3Rope(8.0, 1.0, 4.0, 8192)
    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, **asdict(scaling)}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found = frequencies(128, 5e5, scaling, torch.device("cpu"))
    assert torch.allclose(found, expected, rtol=1e-6)
    assert not torch.allclose(found, frequencies(128, 5e5, None, torch.device("cpu")))


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_every_form_learns(config: Eagle3Config) -> None:
    trainer = trainer_of(made(config))
    row = Row([captured(20, 4), captured(12, 3, seed=1)])
    losses = [trainer.micro_step(row) for _ in range(40)]
    assert losses[-1] < losses[0] - 0.01
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainer.drafter.parameters())


# --- going on -------------------------------------------------------------------------------------


def test_training_goes_on_from_an_export_as_if_it_had_not_stopped(
    target: Path, tmp_path: Path
) -> None:
    row = Row([captured(20, 4)])
    trainer = trainer_of(drafter())
    for _ in range(3):
        trainer.micro_step(row)
    store = VersionStore(tmp_path / "versions", torch.float32)
    store.save(trainer)
    store.wait()
    shared, how = tmp_path / "shared", {"format": "speculators"}
    assert read_moments(exported(tmp_path, target, shared, **how)) is None
    exported(tmp_path, target, shared, **how, moments=True)
    own = adopt(shared, tmp_path / "own", torch.float32, num_target_layers=8)
    assert not list(own.glob("optim*.safetensors"))  # vLLM would load them as weights
    exported(tmp_path, target, shared, **how)
    assert read_moments(shared) is None  # those of another export would not fit
    resumed, moments = trainer_of(load_drafter(own)), read_moments(own)
    assert moments is not None
    resumed.take_moments(moments)
    assert resumed.step == 3
    trainer.micro_step(row)
    resumed.micro_step(row)
    assert all(torch.equal(t, resumed.tensors()[n]) for n, t in trainer.tensors().items())
    assert resumed.drafter.draft_token_ids().tolist() == list(range(0, 40, 2))


def test_what_is_not_there_is_not_exported(target: Path, tmp_path: Path) -> None:
    plain, out = save_drafter(drafter(), tmp_path / "plain"), tmp_path / "out"
    with pytest.raises(ConfigError, match="--moments"):
        exported(plain, target, out, moments=True)
    tensors = load_file(plain / "model.safetensors")
    del tensors["midlayer.mlp.up_proj.weight"]
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(ConfigError, match="up_proj"):
        exported(plain, target, out)
    assert not out.exists()


# --- the card -------------------------------------------------------------------------------------

REPORT = {
    "data": {"num_prompts": 768, "num_response_tokens": 61234, "temperature": 1.0,
             "draft_vocabulary_coverage": 0.979},
    "num_draft_tokens": 2,
    "num_held_out_prompts": 32,
    "acceptance": {
        "before": {"0": {"length": 1.01, "by_position": [0.01, 0.0], "num_drafts": 9}},
        "after": {"0": {"length": 2.34, "by_position": [0.8, 0.54], "num_drafts": 4321}},
    },
}  # fmt: skip


def written_card(source: Path, target: Path, out: Path, **options: Any) -> str:
    return (exported(source, target, out, card=True, **options) / "README.md").read_text()


def test_the_card_says_what_the_run_measured(target: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_drafter(drafter(), run / "versions" / "v000007")
    (run / "versions" / "v000007" / "state.json").write_text('{"progress": {"step": 412}}')
    (run / "report.json").write_text(json.dumps(REPORT))
    card = written_card(run, target, out, format="speculators", target_name="owner/policy")
    assert "base_model: owner/policy\n" in card
    for fact in ("| 0 | 4,321 | 2.34 | 80% | 54% |", "32", "412", "768", "61,234", "97.9%", "20"):
        assert fact in card
    assert "1.01" not in card  # that was the drafter before training
    again = written_card(out, target, tmp_path / "again", target_name="owner/policy")
    assert "| 0 | 4,321 | 2.34 | 80% | 54% |" in again
    assert '"num_speculative_tokens": 2}' in again
    (run / "report.json").write_text('{"acceptance": {"after": {"0": {"length": "long"}}}}')
    with pytest.raises(ConfigError, match=r"--card: .*report\.json"):
        written_card(run, target, out)


def test_the_card_of_an_rl_run_has_its_last_evaluation(target: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_drafter(drafter(), run / "drafter")
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "harvest/held_out_length": 1.5}\n'
        '{"step": 2, "harvest/held_out_length": 1.875}\n{"step": 3}\n{"st'
    )
    (run / "config.toml").write_text("[tlt]\nnum_draft_tokens = 3\n")
    card = written_card(run, target, tmp_path / "out")
    assert "step 2: 1.88 " in card
    assert '"num_speculative_tokens": 3}' in card
    assert "base_model" not in card  # a folder on this machine is nothing to others
    (run / "metrics.jsonl").unlink()
    assert "tokens per draft" not in written_card(run, target, tmp_path / "out")
