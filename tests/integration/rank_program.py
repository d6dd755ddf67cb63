"""One of several ranks that train a very small drafter: `rank_program.py RANK SIZE FOLDER`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from drafter_fixtures import CONFIG, SETTINGS, captured, drafter

from tlt.drafter.ranks import OneRank, Ranks
from tlt.drafter.trainer import DrafterTrainer
from tlt.states.captured import Captured, Offer

NUM_STEPS = 5


class Source:
    """Samples in memory, the same in every rank."""

    def __init__(self) -> None:
        self.samples = {str(n): captured(20 + 7 * n, 4, seed=n) for n in range(10)}

    def offers(self) -> dict[str, Offer]:
        return {name: Offer(len(sample), 1.0) for name, sample in self.samples.items()}

    def read(self, name: str) -> Captured | None:
        return self.samples[name]


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = OneRank()
    if size > 1:
        meeting = f"file://{folder}/meeting-{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        ranks = Ranks(torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    head, embedding = (
        torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator) for _ in range(2)
    )
    settings = replace(SETTINGS, num_rows=4)
    trainer = DrafterTrainer(drafter(), head, embedding, settings, ranks)
    losses: list[float] = []

    def is_over() -> bool:
        return rank == 0 and trainer.step >= NUM_STEPS  # only the first rank knows

    def note(step: int, loss: float) -> None:
        losses.append(loss)

    trainer.session(Source(), lambda: False, note, lambda: 0.5 if rank == 0 else 9.0, is_over)
    torch.save((losses, trainer.tensors()), folder / f"{size}-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
