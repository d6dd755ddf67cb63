"""Packed rows against padded batches: tokens of drafter training a second, side by side.

    python benchmarks/packing.py

One drafter of SmolLM2's size, random states, heavy-tailed lengths (median 60, 95th percentile 500,
longest 1500, as of reasoning models). All ways take the same samples in batches of the same token
budget, forward and backward, and take turns:

    packed     samples one after another in a row
    padded     samples in order of arrival, each padded to the longest of its batch
    sorted     as padded, but samples of similar length together: needs all of them at hand

A padded batch computes all of its positions, as batched tensors do. Tokens are those of samples;
padding does not count. Writes benchmarks/results/packing.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "packing.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    import torch

    from tlt.drafter.eagle3.config import Eagle3Config
    from tlt.drafter.eagle3.model import Eagle3Drafter
    from tlt.drafter.passes import Row
    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings
    from tlt.packing import pack
    from tlt.states.captured import Captured
    from tlt.tasks.tail import HeavyTail

    config = Eagle3Config(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        draft_vocab_size=2048,
        aux_layer_ids=(2, 15, 27),
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    drafter = Eagle3Drafter(config)
    drafter.set_draft_vocabulary(torch.arange(config.draft_vocab_size))
    head = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16) * 0.05
    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=options.row_tokens, lr=1e-5, temperature=1.0, seed=0
    )
    trainer = DrafterTrainer(drafter, head, head, settings)
    tail, rng = HeavyTail(60, 500, 1500), random.Random(0)
    lengths = [max(8, tail.draw(rng)) for _ in range(options.samples)]

    def sample(length: int) -> Captured:
        return Captured(
            token_ids_T=torch.randint(0, config.vocab_size, (length,)),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            aux_TA=torch.randn(length, 3 * config.hidden_size, dtype=torch.bfloat16),
            final_TH=torch.randn(length, config.hidden_size, dtype=torch.bfloat16),
        )

    def padded(order: list[int]) -> list[Row]:
        """Every position of a padded batch is computed, so here a chain starts at every one."""
        batches: list[list[int]] = [[]]
        for length in order:
            longest = max([length, *batches[-1]])
            if batches[-1] and longest * (len(batches[-1]) + 1) > options.row_tokens:
                batches.append([])
            batches[-1].append(length)
        return [Row([sample(max(batch)) for _ in batch]) for batch in batches]

    rows = pack(lengths, options.row_tokens)
    ways: dict[str, list[Row]] = {
        "packed": [Row([sample(lengths[i]) for i in row]) for row in rows],
        "padded": padded(lengths),
        "sorted": padded(sorted(lengths)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(options.rounds + 1):
        names = list(ways)
        turn = round_ % len(names)
        for way in names[turn:] + names[:turn]:
            started = time.perf_counter()
            for row in ways[way]:
                trainer.micro_step(row)
            if round_:  # the first round warms up
                seconds[way].append(time.perf_counter() - started)
    result: dict[str, Any] = {
        "options": vars(options),
        "lengths": {
            "total": sum(lengths),
            "median": statistics.median(lengths),
            "longest": max(lengths),
        },
        "seconds": seconds,
    }
    print(f"{len(lengths)} samples, {sum(lengths)} tokens, rows of {options.row_tokens}")
    for way, times in seconds.items():
        speed = [sum(lengths) / s for s in times]
        ratio = [p / s for p, s in zip(times, seconds["packed"], strict=True)]
        computed = sum(len(row.position_T) for row in ways[way])
        result[way] = {
            "tokens_per_s": statistics.median(speed),
            "filled": sum(lengths) / computed,
            "packed_is_faster_by": statistics.median(ratio),
            "low": min(ratio),
            "high": max(ratio),
        }
        print(
            f"{way:7} {statistics.median(speed):7.0f} tokens/s, {sum(lengths) / computed:4.0%} of "
            f"the positions are samples; packed is {statistics.median(ratio):.2f}x as fast "
            f"({min(ratio):.2f} to {max(ratio):.2f})"
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"provenance": provenance()} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
