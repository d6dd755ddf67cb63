"""The experts of a policy: as checkpoints name them, and in the rows of a rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tlt.config.train import AlgorithmConfig, LearnerConfig, LoraConfig  # noqa: E402
from tlt.learner.batch import TrainSample, Weighting  # noqa: E402
from tlt.learner.experts import by_expert  # noqa: E402
from tlt.learner.export import checkpoint_weights, write_policy  # noqa: E402
from tlt.learner.rank import LearnerRank, RankSettings  # noqa: E402
from tlt.models import tiny  # noqa: E402
from tlt.node.fingerprint import fingerprint, fused  # noqa: E402

SAMPLES = [
    TrainSample("a", 0, (5, 6, 7), (8, 9, 10, 11), (-1.0,) * 4, 0.5),
    TrainSample("b", 0, (5, 6, 7), (12, 13), (-1.0,) * 2, -0.5),
    TrainSample("c", 1, (14,), (15, 16, 17, 18, 19), (-1.0,) * 5, 1.0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    return tiny.make(out, hidden_size=64, num_layers=3, num_experts=4)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def rank(model: Path, checkpointing: bool = False) -> LearnerRank:
    learner = LearnerConfig(gradient_checkpointing=checkpointing, lr=1e-2, max_grad_norm=1e9)
    settings = RankSettings(
        str(model), "float32", 1.0, Weighting("tokens", 64), AlgorithmConfig(max_importance=0),
        learner, aux_layer_ids=(0, 1, 2),
    )  # fmt: skip
    return LearnerRank(settings, torch.device("cpu"))


def test_names_and_values_are_those_of_the_checkpoint(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    found = [
        each for name, tensor in load(model).named_parameters() for each in by_expert(name, tensor)
    ]
    assert len(found) == len(stored)
    assert {name for name, _ in found} == set(stored)
    assert all(tensor.equal(stored[name]) for name, tensor in found)


def test_a_stack_has_the_fingerprint_of_its_matrices() -> None:
    stack = torch.randn(4, 6, 10)
    parts = [fingerprint(t, 3) for _, t in by_expert("model.layers.0.mlp.experts.down_proj", stack)]
    assert fused(parts) == fingerprint(stack, 3)
    swapped = stack[[1, 0, 2, 3]]
    assert fused(parts) != fingerprint(swapped, 3)


@pytest.mark.usefixtures("group")
def test_a_rank_computes_what_the_policy_does_and_hands_out_its_experts(
    model: Path, tmp_path: Path
) -> None:
    """The update, with and without checkpointing; shapes, weights, a checkpoint and an export."""
    ranks = [rank(model, checkpointing) for checkpointing in (False, True)]
    gaps = 0.0
    with torch.no_grad():
        policy = load(model)
        for sample in SAMPLES:
            logits = policy(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
            logprobs = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(sample.response_ids)[:, None])
            gaps += (chosen + 1.0).abs().sum().item()
    weights = []
    for each in ranks:
        each.accumulate([SAMPLES, []])
        report = each.step(denominator=11.0, max_gap=1e9)
        assert report.sums.gap == pytest.approx(gaps, rel=1e-4)
        assert report.grad_norm > 0
        weights.append(dict(each.full_weights(torch.float32)))
        shapes = dict(each.shapes())
        assert list(weights[-1]) == list(shapes)
        assert all(list(t.shape) == shapes[name] for name, t in weights[-1].items())
    stored = load_file(model / "model.safetensors")
    assert set(weights[0]) == set(stored)
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    assert any(not weights[0][expert.format(i)].equal(stored[expert.format(i)]) for i in range(4))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-6, rtol=1e-5)

    ranks[0].save(tmp_path / "saved")
    ranks[0].wait_saved()
    saved = checkpoint_weights(tmp_path / "saved", "float32")
    write_policy(saved, model, tmp_path / "exported", "float32", {}, LoraConfig())
    written = load(tmp_path / "exported")
    for name, tensor in written.named_parameters():
        for own, part in by_expert(name, tensor):
            assert part.equal(weights[0][own]), own


def test_the_tiny_model_uses_two_experts_for_a_token(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
