"""What the learner's capture of hidden states costs a policy update.

    python benchmarks/learner.py [--model models/smollm2-sft]

One batch of groups (chain_sum problems, their worked solutions as responses, heavy-tailed lengths),
one FSDP2 rank in one process with all cores, bfloat16 matrix products. Updates with and without
capture, which hands hidden states to the node's buffer, take turns. Writes
benchmarks/results/learner.json.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

from common import ratios, save, spread


def samples_of(options: argparse.Namespace) -> list[Any]:
    from tlt.learner.batch import TrainSample
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    chat, samples = Chat(options.model), []
    for group, problem in enumerate(problems("chain_sum", options.groups, seed=7)):
        ids, num_prompt = chat.answered(problem.question, problem.solution)
        for place in range(options.group_size):
            # As samples of a group differ: some end a little earlier.
            response = ids[num_prompt : len(ids) - place]
            logprobs = (-0.1,) * len(response)
            advantage = 1.0 if place % 2 else -1.0
            name = f"{group}/{place}"
            samples.append(
                TrainSample(name, group, ids[:num_prompt], response, logprobs, advantage)
            )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-sft")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    from tlt.config.train import AlgorithmConfig, LearnerConfig
    from tlt.drafter.eagle3.config import Eagle3Config
    from tlt.learner.batch import TrainSample, Weighting, rows_by_rank
    from tlt.learner.rank import LearnerRank, RankSettings
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import Captured
    from tlt.states.writer import StateWriter

    samples = samples_of(options)
    num_tokens = sum(map(len, samples))
    weighting = Weighting("tokens", 1024)
    denominator = weighting.denominator([len(s.response_ids) for s in samples])
    meeting = f"file://{tempfile.mkdtemp()}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    aux = tuple(Eagle3Config.for_target(AutoConfig.from_pretrained(options.model)).aux_layer_ids)
    learner = LearnerConfig(lr=1e-6)
    settings = RankSettings(
        options.model, "bfloat16", 1.0, weighting, AlgorithmConfig(), learner, aux
    )
    rank = LearnerRank(settings, torch.device("cpu"))
    shared = tempfile.mkdtemp(prefix="tlt-bench-", dir="/dev/shm")
    writer = StateWriter(SampleBuffer(BufferSettings(shared, 2**30, max_sample_tokens=4096)))
    rows = rows_by_rank(samples, options.row_tokens, 1)[0]

    def keep_states(sample: TrainSample, aux_TA: torch.Tensor, final_TH: torch.Tensor) -> None:
        captured = Captured.of(sample.prompt_ids, sample.response_ids, aux_TA, final_TH)
        writer.write(sample.sample_id, 0, captured)

    def update(keep: bool) -> float:
        started_s = time.perf_counter()
        rank.keep_states = keep_states if keep else None
        rank.accumulate(rows)
        rank.step(denominator, math.inf)
        if keep:
            writer.drain()
        return time.perf_counter() - started_s

    seconds: dict[str, list[float]] = {"tlt": [], "capture": []}
    try:
        for round_ in range(options.rounds + 1):
            for name, of in seconds.items():
                elapsed_s = update(keep=name == "capture")
                if round_:  # the first one warms up
                    of.append(elapsed_s)
                print(f"round {round_}: {name} {num_tokens / elapsed_s:.0f} tokens/s", flush=True)
    finally:
        shutil.rmtree(shared)
        dist.destroy_process_group()
    found = spread(ratios(seconds["tlt"], seconds["capture"]))
    print("capture against none:", found)
    save(
        "learner",
        {
            "model": options.model,
            "num_samples": len(samples),
            "num_tokens": num_tokens,
            "tokens_per_s": {n: num_tokens / statistics.median(s) for n, s in seconds.items()},
            "capture_against_tlt": found,
            "seconds": seconds,
        },
    )


if __name__ == "__main__":
    main()
