"""A trainer leaves its GPU with what it needs, in a time that follows from its size."""

import pytest

torch = pytest.importorskip("torch")

from drafter_fixtures import CONFIG, captured, drafter  # noqa: E402

from tlt.drafter.eagle3.config import (  # noqa: E402
    default_draft_vocabulary,
    harvest_draft_vocabulary,
)
from tlt.drafter.passes import Row  # noqa: E402
from tlt.drafter.trainer import DrafterTrainer, HostCopies, TrainerSettings  # noqa: E402
from tlt.harvest.leases import COPY_BYTES_PER_S, STOP_S, moved_bytes, stop_timeout_s  # noqa: E402


def make_trainer() -> DrafterTrainer:
    generator = torch.Generator().manual_seed(5)
    ends = torch.randn(2, CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    settings = TrainerSettings(
        num_draft_tokens=3, row_tokens=120, lr=3e-3, temperature=1.0, seed=0, bfloat16=False,
        averaged_steps=4,
    )  # fmt: skip
    return DrafterTrainer(drafter(), ends[0], ends[1], settings)


def rows() -> list[Row]:
    return [Row([captured(40, 4, seed=seed)]) for seed in range(4)]


def test_training_goes_on_as_if_the_trainer_had_never_left_the_device() -> None:
    stayed, left = make_trainer(), make_trainer()
    for row in rows():
        stayed.micro_step(row)
        left.micro_step(row)
        left.park()
    for method in (DrafterTrainer.weights, DrafterTrainer.mean_weights):
        one, other = method(stayed), method(left)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_leaves_the_device_has_the_size_that_the_time_is_derived_from() -> None:
    trainer = make_trainer()
    trainer.micro_step(rows()[0])
    trainer.park()
    assert all(p.grad is None for p in trainer.drafter.parameters()), "gradients stay behind"
    moved = sum(t.numel() * 4 for n, t in trainer.moving_tensors().items() if not n.endswith("d2t"))
    assert moved == moved_bytes(CONFIG.num_parameters)


def test_host_memory_is_used_again_and_holds_the_latest_values() -> None:
    copies, device = HostCopies(), torch.device("cpu")
    host = {"weight": torch.arange(6.0), "moment": torch.zeros(6)}
    sent = copies.send(host, device)
    assert sent["weight"].data_ptr() != host["weight"].data_ptr(), "the device has its own"
    sent["weight"].mul_(2)
    back = copies.fetch(sent | {"moment": torch.ones(9), "mean": torch.ones(2)})
    assert back["weight"].data_ptr() == host["weight"].data_ptr()
    assert back["weight"].tolist() == [0, 2, 4, 6, 8, 10]
    assert back["moment"].tolist() == [1] * 9, "memory of another size is not used"
    assert back["mean"].tolist() == [1, 1], "made on the device"


def test_the_timeout_follows_from_the_size() -> None:
    assert stop_timeout_s(10**9, embed_and_head_bytes=10**9, on_gpu=False) == STOP_S
    both_ways = 2 * moved_bytes(10**9) + 10**9
    given_s = stop_timeout_s(10**9, embed_and_head_bytes=10**9, on_gpu=True)
    assert given_s == STOP_S + both_ways / COPY_BYTES_PER_S


@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab_size"),
    [(256, 256), (65536, 65536), (128256, 32768)],
)
def test_only_large_vocabularies_are_cut(vocab_size: int, draft_vocab_size: int) -> None:
    assert default_draft_vocabulary(vocab_size) == draft_vocab_size
    assert harvest_draft_vocabulary(vocab_size, on_gpu=True) == draft_vocab_size
    assert harvest_draft_vocabulary(vocab_size, on_gpu=False) == min(vocab_size, 4096)
