"""LoRA: only adapters are trained and kept; everybody else gets merged weights."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_run import REQUIRED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tlt.config.train import AlgorithmConfig, LearnerConfig, LoraConfig  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402
from tlt.learner.batch import TrainSample, Weighting  # noqa: E402
from tlt.learner.export import write_policy  # noqa: E402
from tlt.learner.rank import LearnerRank, RankSettings  # noqa: E402
from tlt.models import tiny  # noqa: E402
from tlt.train.export import export_policy  # noqa: E402
from tlt.train.folder import RunFolder  # noqa: E402

LORA = LoraConfig(rank=4, alpha=8.0)
Weights = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("lora")
    dist.init_process_group("gloo", init_method=f"file://{home}/meet", rank=0, world_size=1)
    yield tiny.make(home / "model", hidden_size=64, num_layers=2)
    dist.destroy_process_group()


def learner(model: Path, lora: LoraConfig = LORA, **changes: Any) -> LearnerRank:
    own = {name: changes.pop(name) for name in [*changes] if name in RankSettings.__slots__}
    settings = RankSettings(
        model=str(model),
        dtype="float32",
        temperature=1.0,
        weighting=Weighting("tokens", 64),
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(lr=1e-2, lora=lora, **changes),
    )
    return LearnerRank(replace(settings, **own), torch.device("cpu"))


def train(rank: LearnerRank, seeds: range) -> list[float]:
    norms = []
    for seed in seeds:
        rng = random.Random(seed)
        prompt = tuple(rng.randrange(5, 250) for _ in range(9))
        rows = [
            TrainSample(f"{i}", 0, prompt, (rng.randrange(5, 250),) * 7, (-5.0,) * 7, 1.0 - i)
            for i in range(3)
        ]
        rank.accumulate([rows])
        norms.append(rank.step(21.0, 1e9).grad_norm)
    return norms


def weights(rank: LearnerRank, dtype: Any = torch.float32) -> Weights:
    return {name: tensor.clone() for name, tensor in rank.full_weights(dtype)}


def differing(one: Weights, other: Weights) -> set[str]:
    assert one.keys() == other.keys()
    return {name.split(".")[-2] for name in one if not torch.equal(one[name], other[name])}


def of_folder(folder: Path, dtype: Any = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_the_model_s_own_names_and_its_frozen_weights(
    model: Path, dtype: str
) -> None:
    compute = getattr(torch, dtype)
    before = dict(of_folder(model, compute).named_parameters())
    rank = learner(model, dtype=dtype)
    assert differing(weights(rank, compute), before) == set()
    assert [name for name, _ in rank.shapes()] == [*before]
    assert all(shape == list(before[name].shape) for name, shape in rank.shapes())
    train(rank, range(2))
    merged = weights(rank, compute)
    assert differing(merged, before) == ALL
    assert differing(merged, weights(rank, compute)) == set()
    some = learner(model, LoraConfig(rank=4, target_modules=["v_proj"]), dtype=dtype)
    train(some, range(2))
    assert differing(weights(some, compute), before) == {"v_proj"}


def test_no_state_and_no_gradient_but_of_float32_adapters(model: Path) -> None:
    rank = learner(model, dtype="bfloat16")
    train(rank, range(1))
    for state in rank._optimizer.state.values():
        assert state["exp_avg"].dtype == torch.float32
    assert len(rank._optimizer.state) == len(rank.adapter()) == 2 * 2 * len(ALL)
    for name, parameter in rank._policy.named_parameters():
        adapter = name.removeprefix("policy.") in rank.adapter()
        assert parameter.requires_grad == adapter
        assert parameter.dtype == (torch.float32 if adapter else torch.bfloat16), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learner_computes_what_the_merged_model_does(model: Path, checkpointing: bool) -> None:
    rank = learner(model, gradient_checkpointing=checkpointing)
    train(rank, range(2))
    ids = (5, 9, 11, 200, 7, 30)
    sample = TrainSample("0", 0, ids[:2], ids[2:], (-5.0,) * 4, 1.0)
    found = rank._policy(rank._pack([sample])).logprob_P
    policy = of_folder(model)
    policy.load_state_dict(weights(rank))
    logits = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = torch.stack([logits[at - 1, ids[at]] for at in range(2, 6)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_first_policy_is_the_reference_without_a_copy(model: Path) -> None:
    rank = learner(model, algorithm=AlgorithmConfig(kl_weight=0.1))
    sample = TrainSample("0", 0, (5, 9), (11, 200), (-5.0,) * 2, 1.0)
    row = rank._pack([sample])
    first = rank._policy(row).logprob_P.detach()
    train(rank, range(2))
    assert rank._reference is None
    found = rank._reference_logprobs(row)
    assert found is not None
    assert torch.equal(found, first)
    assert not torch.equal(rank._policy(row).logprob_P, first)


def test_a_checkpoint_holds_adapters_and_goes_on_in_every_bit(model: Path, tmp_path: Path) -> None:
    rank = learner(model)
    train(rank, range(2))
    rank.save(tmp_path / "saved")
    rank.wait_saved()
    known = torch.distributed.checkpoint.FileSystemReader(tmp_path / "saved").read_metadata()
    names = {name for name in known.state_dict_metadata if name.startswith("policy.")}
    assert names == {f"policy.policy.{name}" for name in rank.adapter()}
    moments = [name for name in known.state_dict_metadata if name.endswith("exp_avg")]
    assert len(moments) == len(names)
    again = learner(model, seed=1)
    assert not torch.equal(*(next(iter(r.adapter().values())) for r in (rank, again)))
    again.restore(tmp_path / "saved")
    assert train(again, range(2, 4)) == train(rank, range(2, 4))
    assert differing(weights(again), weights(rank)) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_the_merged_policy_and_the_adapter(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    rank = learner(model, dtype=dtype)
    train(rank, range(2))
    run, compute = RunFolder(tmp_path / "run"), getattr(torch, dtype)
    hidden = run.begin_checkpoint(3)
    rank.save(hidden / "learner")
    rank.wait_saved()
    run.publish_checkpoint(hidden, 3, keep=2)
    tree: dict[str, Any] = {**REQUIRED, "policy": {"model": str(model), "dtype": dtype}}
    tree["learner"] = {"lora": LORA.model_dump()}
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(tree))
    (tmp_path / "run" / "inputs.json").write_text('{"policy.model": "another"}')
    with pytest.raises(ConfigError, match=r"policy\.model: its files have changed"):
        export_policy(tmp_path / "run", None, tmp_path / "refused")
    (tmp_path / "run" / "inputs.json").unlink()
    exported, final = tmp_path / "exported", tmp_path / "final"
    assert export_policy(tmp_path / "run", None, exported) == 3
    write_policy(weights(rank, compute), model, final, dtype, rank.adapter(), LORA)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert differing(load_file(exported / name), load_file(final / name)) == set()
    merged = of_folder(exported, compute)
    assert differing(merged.state_dict(), weights(rank, compute)) == set()
    said = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], set(said["target_modules"])) == (4, 8.0, ALL)
    # peft loads the adapter, and merges it to the same weights.
    by_peft = peft.PeftModel.from_pretrained(of_folder(model), exported / "adapter")
    own = by_peft.merge_and_unload().state_dict()
    for name, tensor in weights(rank).items():
        tolerance = 1e-6 if dtype == "float32" else 2e-2
        torch.testing.assert_close(own[name], tensor, atol=tolerance, rtol=tolerance)
