"""The learner's update and the drafter's training mix no devices and no dtypes on a GPU.

Both run on tensors that say they are on a GPU (`gpu_tensors`), and compute what they compute on the
CPU. Not seen here: FSDP, fused optimizers, and what CUDA's autocast casts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drafter_fixtures import CONFIG, SETTINGS, captured, drafter

from gpu.gpu_tensors import DEVICE, KERNELS, Gpu, GpuTensor
from tlt.config.rollout import EngineConfig
from tlt.config.train import AlgorithmConfig, LearnerConfig
from tlt.drafter.checkpoint import load_drafter
from tlt.drafter.evaluation import Acceptance, compare
from tlt.drafter.ranks import Ranks
from tlt.drafter.trainer import DrafterTrainer
from tlt.learner import rank as rank_module
from tlt.learner.batch import WAITING_ROWS, TrainSample, Weighting
from tlt.learner.policy import PackedPolicy, PackedRow
from tlt.learner.rank import LearnerRank, RankSettings
from tlt.models import tiny
from tlt.offline import training
from tlt.offline.drafter import first_trainer, save_initial
from tlt.offline.training import DrafterPlan
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured, Offer
from tlt.states.writer import StateWriter

CPU = torch.device("cpu")


# --- attention in one kernel, which only a GPU has ----------------------------------------------


def attention(
    query_TND: Any, key_TKD: Any, value_TKD: Any, ends: Any, ends_k: Any, longest: int,
    longest_k: int, is_causal: bool, scale: float, window: list[int], gqa: bool, *rest: Any,
) -> Any:  # fmt: skip
    """Compute what the kernel behind `varlen_attn` computes, as it takes its arguments."""
    lengths = ends.diff().tolist()
    assert ends.dtype == torch.int32
    assert query_TND.dtype == torch.bfloat16
    assert (longest, longest_k) == (max(lengths), max(lengths))
    assert (is_causal, window, gqa) == (True, [-1, 0], True)
    parts = []
    for query, key, value in _by_sample(lengths, query_TND, key_TKD, value_TKD):
        parts.append(_weights(query, key, scale) @ value)
    out_TND = torch.cat(parts, 1).transpose(0, 1).to(query_TND.dtype)
    return out_TND, torch.zeros(0), torch.zeros(2, dtype=torch.uint64)


def attention_backward(
    grad_TND: Any, query_TND: Any, key_TKD: Any, value_TKD: Any, out: Any, lse: Any, ends: Any,
    ends_k: Any, longest: int, longest_k: int, is_causal: bool, rng: Any, scale: float, *rest: Any,
) -> Any:  # fmt: skip
    """Compute the gradients of `attention`."""
    lengths = ends.diff().tolist()
    found = []
    for grad, query, key, value in _by_sample(lengths, grad_TND, query_TND, key_TKD, value_TKD):
        weights = _weights(query, key, scale)
        change = grad @ value.mT
        scores = scale * weights * (change - (change * weights).sum(-1, keepdim=True))
        found.append((scores @ key, scores.mT @ query, weights.mT @ grad))
    whole = [torch.cat(parts, 1).transpose(0, 1) for parts in zip(*found, strict=True)]
    # Query heads that share a key head add up.
    return tuple(
        part.unflatten(1, (given.shape[1], -1)).sum(2).to(given.dtype)
        for part, given in zip(whole, (query_TND, key_TKD, value_TKD), strict=True)
    )


def _by_sample(lengths: list[int], *tensors: Any) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each sample [N, T, D] in float32, with a key head per query head."""
    num_heads = tensors[0].shape[1]
    for parts in zip(*(t.float().split(lengths) for t in tensors), strict=True):
        yield [p.repeat_interleave(num_heads // p.shape[1], 1).transpose(0, 1) for p in parts]


def _weights(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).triu(1)
    return (query @ key.mT * scale).masked_fill(later, -torch.inf).softmax(-1)


# --- the learner --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy"), hidden_size=64, num_layers=6)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let one rank hold the policy without FSDP: its mesh is a device. Give it the kernel."""

    def whole(
        policy: Any, settings: Any, device: Any, aux_layer_ids: Any = (), kernel: bool = False
    ) -> Any:
        if settings.learner.gradient_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        policy = policy.to(device, getattr(torch, settings.dtype))
        packed: Any = PackedPolicy(policy, settings.temperature, aux_layer_ids, kernel).train()
        packed.reset_iter_state = lambda: None  # FSDP's
        return packed

    monkeypatch.setattr(rank_module, "sharded", whole)
    monkeypatch.setitem(KERNELS, torch.ops.torch_attn._varlen_attn.default, attention)
    monkeypatch.setitem(
        KERNELS, torch.ops.torch_attn._varlen_attn_backward.default, attention_backward
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def samples(shared: bool) -> list[TrainSample]:
    """Return samples of one prompt, or of a prompt each."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 250, (count,), generator=generator).tolist())

    prompt = ids(7)
    return [
        TrainSample(str(k), 0, prompt if shared else ids(7), ids(n), (-1.0,) * n, 0.5 * k - 0.4)
        for k, n in enumerate((5, 1, 12))
    ]


def update(
    model: Path, device: torch.device, checkpointing: bool, batch: list[TrainSample], folder: Path
) -> tuple[Any, list[torch.Tensor], dict[str, Captured]]:
    """Return the report of an update, the gradients, and the states in the node's buffer."""
    settings = RankSettings(
        str(model), "bfloat16", 0.7, Weighting("tokens", 64), AlgorithmConfig(kl_weight=0.1),
        LearnerConfig(gradient_checkpointing=checkpointing), (1, 3, 4),
    )  # fmt: skip
    folder.mkdir()
    buffer = BufferSettings(folder=str(folder), capacity_bytes=2**20, max_sample_tokens=16)
    writer = StateWriter(SampleBuffer(buffer), WAITING_ROWS)

    def keep(row: PackedRow, aux_TA: torch.Tensor, final_TH: torch.Tensor) -> None:
        texts = [(s.sample_id, s.prompt_ids, s.response_ids) for s in row.samples]
        writer.write_row(1, texts, row.unshare_E, aux_TA, final_TH)

    rank = LearnerRank(settings, device, keep)
    rank.remember_logprobs([batch])
    rank.accumulate([batch, []])
    writer.drain()
    gradients = [p.grad.clone() for p in rank._policy.parameters() if p.grad is not None]
    report = rank.step(sum(len(s.response_ids) for s in batch), float("inf"))
    read = {name: writer.buffer.read(name) for name in writer.buffer.offers()}
    stored = {name: sample for name, sample in read.items() if sample is not None}
    assert writer.num_dropped == 0
    return report, gradients, stored


@pytest.mark.parametrize(
    ("shared", "checkpointing"),
    [
        pytest.param(True, True, marks=pytest.mark.gate),
        (True, False),
        (False, True),
        (False, False),
    ],
)
def test_an_update_on_a_gpu_is_that_of_the_cpu(
    shared: bool, checkpointing: bool, model: Path, alone: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    batch = samples(shared)
    results = []
    monkeypatch.setattr(rank_module, "init_device_mesh", lambda kind, shape: torch.device(kind, 0))
    for device in (CPU, DEVICE):
        with Gpu():
            results.append(update(model, device, checkpointing, batch, tmp_path / device.type))
    (expected, wanted, captured), (report, gradients, found) = results
    assert all(type(gradient) is GpuTensor for gradient in gradients)
    assert report.sums.learned_tokens == 18
    assert report.sums.gap == pytest.approx(expected.sums.gap, rel=0.01)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.held, other, atol=0.02, rtol=0.1)
    assert found.keys() == captured.keys()
    for name in found:
        torch.testing.assert_close(found[name].aux_TA, captured[name].aux_TA, atol=0.05, rtol=0.05)


# --- the drafter's trainer ----------------------------------------------------------------------


class Source:
    """Samples in host memory, as they are in the node's buffer."""

    def __init__(self) -> None:
        self._samples = {str(n): captured(30 + 9 * n, 5 + n, seed=n) for n in range(6)}

    def offers(self) -> dict[str, Offer]:
        return {name: Offer(len(sample), 1.0) for name, sample in self._samples.items()}

    def read(self, name: str) -> Captured | None:
        return self._samples[name]


def trained(device: torch.device, bfloat16: bool) -> tuple[list[float], Acceptance, bool]:
    """Return the losses of optimizer steps, an evaluation, and whether the vocabulary changed."""
    generator = torch.Generator().manual_seed(5)
    shape = CONFIG.vocab_size, CONFIG.hidden_size
    head, embedding = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    settings = replace(SETTINGS, averaged_steps=3, bfloat16=bfloat16, row_tokens=60)
    trainer = DrafterTrainer(drafter().to(device), head, embedding, settings)
    published = trainer.weights()
    losses: list[float] = []
    trainer.session(
        Source(),
        should_stop=lambda: len(losses) > 2,
        on_step=lambda step, loss: losses.append(loss),
    )
    trainer.drafter.load_state_dict(trainer.mean_weights())
    _, acceptance = compare(trainer.passes, published, [captured(40, 6, seed=9)], 1.0, (0.0, 0.6))
    changed = trainer.check_vocabulary([torch.arange(1, 41, 2).repeat(50)])
    assert trainer.moments()["step"] == 3
    assert next(iter(trainer.tensors().values())).device == device
    row = trainer.draw(Source())
    assert row is not None
    losses.append(trainer.micro_step(row))
    return losses, acceptance, changed


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_training_a_drafter_on_a_gpu_is_that_of_the_cpu() -> None:
    with Gpu():
        expected, found = trained(CPU, bfloat16=False), trained(DEVICE, bfloat16=False)
        trained(DEVICE, bfloat16=True)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].rates[0.6] == pytest.approx(expected[1].rates[0.6], rel=1e-4)
    assert found[2]


def command(model: Path, out: Path, device: torch.device) -> list[dict[str, Any]]:
    """Return the evaluations of `tlt drafter train` on the only rank of a group."""
    ids = [tuple(range(n, n + 30, 1 + n % 3)) for n in range(5, 17)]
    plan = DrafterPlan(
        EngineConfig(model=str(model), num_gpus=1), 1, 1, tuple(ids), tuple(ids[:1]), out,
        max_tokens=8, temperature=1.0, budget_s=600.0, num_steps=2, draft_vocab_size=None,
        trainer=replace(SETTINGS, num_rows=2), dtype="float32", init=None,
    )  # fmt: skip
    save_initial(plan, first_trainer(plan))
    (out / "samples").mkdir()
    buffer = BufferSettings(str(out / "samples"), 2**22, 64, held_out_share=0.3)
    until_s = time.monotonic() + plan.budget_s
    with Gpu() as gpu:
        texts = [(prompt, prompt[::-1]) for prompt in ids]
        found = training.train(plan, texts, buffer, Ranks(device), device, until_s, print)
    assert found[-1]["step"] == 2
    assert (gpu.num_waits > 0) == (device == DEVICE)
    assert load_drafter(out / "versions" / "v000001").config.hidden_size == 64
    return found[1:]  # the first one has no loss


@pytest.mark.gate
def test_the_command_trains_a_drafter_on_a_gpu_as_on_the_cpu(
    model: Path, alone: None, tmp_path: Path
) -> None:
    """The policy's pass, the gradients' sum, evaluations and stored versions; not NCCL."""
    expected, found = (command(model, tmp_path / d.type, d) for d in (CPU, DEVICE))
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert one.pop("elapsed_s") >= 0 <= other.pop("elapsed_s")
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.gate
def test_the_stand_in_refuses_what_a_gpu_refuses() -> None:
    with Gpu() as gpu:
        ones = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="on cpu"):
            ones + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            ones.numpy()
        (ones * 2 + torch.tensor(1.0))[torch.tensor([0, 2])].to("cpu", non_blocking=True)
        assert gpu.num_waits == 0
        assert ones.sum().item() == 3
        assert gpu.num_waits == 1
