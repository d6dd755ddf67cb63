"""What trainers that average their drafters teach a new one, by the size of their rows.

    python benchmarks/trainers.py [--problems 640]

Several trainers learn from the samples of one policy (`tlt models words`), in rounds as in harvest:
all start from the same weights, each learns as many tokens, and their weights are averaged. Every
row is one optimizer step. On emulated GPUs, tokens are time, so smaller rows are more steps in the
same time; on any machine this ends where a step takes as long with fewer tokens.

Writes benchmarks/results/trainers.json: expected tokens per draft of at most 3, after the tokens
that each of the trainers has learned.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from common import parse_options, save
from distance import policy_and_ends, samples
from losses import Samples
from tlt.drafter.evaluation import evaluate_samples
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.harvest.trainer import NEW_AVERAGED_STEPS, averaged

TRAINERS, ROWS = (1, 4), (512, 256, 128)
DEPTH = 3
LR = 3e-3
ROUND_TOKENS = 4096
ROUNDS, EVERY = 12, 3
"""Rounds, and how many of them pass between evaluations."""
HELD_OUT = 48


def learned(source: Samples, held_out: Any, count: int, row: int) -> list[float]:
    """Return the expected tokens per draft after every few rounds."""
    policy, head, embedding = policy_and_ends()
    trainers = []
    for seed in range(count):
        settings = TrainerSettings(
            num_draft_tokens=DEPTH,
            row_tokens=row,
            lr=LR,
            temperature=1.0,
            seed=seed,
            averaged_steps=NEW_AVERAGED_STEPS,
            bfloat16=False,
        )
        drafter = fresh_drafter(policy.config, head, None)
        trainers.append(DrafterTrainer(drafter, head, embedding, settings))
    found = []
    for number in range(1, ROUNDS + 1):
        for trainer in trainers:
            for _ in range(ROUND_TOKENS // row):
                drawn = trainer.draw(source)
                assert drawn is not None
                trainer.micro_step(drawn)
        results = [(trainer.mean_weights(), 1.0) for trainer in trainers]
        merged = averaged(results) or results[0][0]
        for trainer in trainers:
            trainer.load(merged)
        if number % EVERY == 0:
            acceptance = evaluate_samples(trainers[0].passes, held_out, [1.0])
            found.append(acceptance.length(1.0))
    return found


def main() -> None:
    options = parse_options(__doc__, problems=640)
    torch.set_num_threads(1)
    policy, _, _ = policy_and_ends()
    source = Samples(samples(policy, 1.0, options.problems, "train"))
    held_out = samples(policy, 1.0, HELD_OUT, "distance")
    rows = []
    for count, row in product(TRAINERS, ROWS):
        lengths = learned(source, held_out, count, row)
        rows.append({"trainers": count, "row_tokens": row, "tokens_per_draft": lengths})
        print(rows[-1], flush=True)
    tokens = [EVERY * ROUND_TOKENS * place for place in range(1, ROUNDS // EVERY + 1)]
    save("trainers", {"tokens_of_each": tokens, "rows": rows})


if __name__ == "__main__":
    main()
