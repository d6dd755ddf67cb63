"""The policy update against a plain transformers loop, and what capture costs, side by side.

    python benchmarks/learner.py [--model models/smollm2-sft]

One batch of groups (chain_sum problems, their worked solutions as responses, heavy-tailed lengths),
one process with all cores, bfloat16 matrix products, float32 weights, AdamW, the same loss:

    tlt        FSDP2 rank: packed rows, a prompt computed once for its group, head on responses only
    unshared   the same with every sample's prompt computed for itself
    capture    as tlt, with hidden states handed to the node's buffer
    plain      model(ids, mask).logits over padded micro-batches of the same token budget, samples
               sorted by length, log-softmax of the response's tokens

All take turns. Tokens are those of prompts and responses; padding does not count, a shared prompt
counts for each of its samples. Writes benchmarks/results/learner.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "learner.json"


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
    from transformers import AutoConfig, AutoModelForCausalLM

    from tlt.config.train import AlgorithmConfig, LearnerConfig
    from tlt.drafter.eagle3.config import Eagle3Config
    from tlt.learner.batch import TrainSample, Weighting, rows_by_rank
    from tlt.learner.policy_loss import policy_loss
    from tlt.learner.rank import LearnerRank, RankSettings
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import Captured
    from tlt.states.writer import StateWriter
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    chat = Chat(options.model)
    samples = []
    for group, problem in enumerate(problems("chain_sum", options.groups, seed=7)):
        ids, num_prompt = chat.answered(problem.question, problem.solution)
        for place in range(options.group_size):
            # As samples of a group differ: some end a little earlier.
            response = ids[num_prompt : len(ids) - place]
            samples.append(
                TrainSample(
                    f"{group}/{place}",
                    group,
                    ids[:num_prompt],
                    response,
                    (-0.1,) * len(response),
                    1.0 if place % 2 else -1.0,
                )
            )
    num_tokens = sum(map(len, samples))
    weighting = Weighting("tokens", 1024)
    denominator = weighting.denominator([len(s.response_ids) for s in samples])

    dist.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1
    )
    aux = tuple(Eagle3Config.for_target(AutoConfig.from_pretrained(options.model)).aux_layer_ids)
    algorithm = AlgorithmConfig()
    settings = RankSettings(
        options.model, "bfloat16", 1.0, weighting, algorithm, LearnerConfig(lr=1e-6), aux
    )
    rank = LearnerRank(settings, torch.device("cpu"))
    shared = tempfile.mkdtemp(prefix="tlt-bench-", dir="/dev/shm")
    writer = StateWriter(SampleBuffer(BufferSettings(shared, 2**30, max_sample_tokens=4096)))

    def keep_states(sample: TrainSample, aux_TA: torch.Tensor, final_TH: torch.Tensor) -> None:
        captured = Captured.of(sample.prompt_ids, sample.response_ids, aux_TA, final_TH)
        writer.write(sample.sample_id, 0, captured)

    def update(rows: list[list[TrainSample]], keep: bool) -> None:
        rank.keep_states = keep_states if keep else None
        rank.accumulate(rows)
        rank.step(denominator, math.inf)
        if keep:
            writer.drain()

    together = rows_by_rank(samples, options.row_tokens, 1)[0]
    # Prompts told apart by nothing but their samples' order: no two neighbours share.
    apart = _apart(samples, options.row_tokens)

    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)

    def plain_update() -> None:
        for batch in _padded(samples, options.row_tokens):
            longest = max(map(len, batch))
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, sample in enumerate(batch):
                ids[row, : len(sample)] = torch.tensor(sample.prompt_ids + sample.response_ids)
                mask[row, : len(sample)] = 1
            with torch.autocast("cpu", torch.bfloat16):
                logits = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits
            parts = []
            for row, sample in enumerate(batch):
                first = len(sample.prompt_ids)
                chosen = logits[row, first - 1 : len(sample) - 1].float()
                target = ids[row, first : len(sample)]
                parts.append(-torch.nn.functional.cross_entropy(chosen, target, reduction="none"))
            logprob = torch.cat(parts)
            advantage = torch.cat([torch.full((len(s.response_ids),), s.advantage) for s in batch])
            engine = torch.full_like(logprob, -0.1)
            result = policy_loss(
                logprob, logprob.detach(), engine, advantage, torch.ones_like(logprob), algorithm
            )
            (result.total / denominator).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ways: dict[str, Callable[[], None]] = {
        "tlt": lambda: update(together, False),
        "capture": lambda: update(together, True),
        "unshared": lambda: update(apart, False),
        "plain": plain_update,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for round_ in range(options.rounds + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                elapsed = time.perf_counter() - started
                if round_:  # the first one warms up
                    seconds[name].append(elapsed)
                print(f"round {round_}: {name} {num_tokens / elapsed:.0f} tokens/s", flush=True)
    finally:
        shutil.rmtree(shared)

    def ratio(of: str, to: str) -> dict[str, Any]:
        each = [b / a for a, b in zip(seconds[of], seconds[to], strict=True)]
        return {"median": statistics.median(each), "low": min(each), "high": max(each)}

    lengths = sorted(len(s.response_ids) for s in samples)
    report = {
        "provenance": provenance(),
        "model": options.model,
        "num_samples": len(samples),
        "num_tokens": num_tokens,
        "computed_tokens": sum(len(s.response_ids) for s in samples)
        + sum(len(samples[g * options.group_size].prompt_ids) for g in range(options.groups)),
        "response_tokens": {"median": lengths[len(lengths) // 2], "longest": lengths[-1]},
        "tokens_per_s": {n: num_tokens / statistics.median(s) for n, s in seconds.items()},
        "tlt_against_plain": ratio("tlt", "plain"),
        "unshared_against_plain": ratio("unshared", "plain"),
        "capture_against_tlt": ratio("capture", "tlt"),
        "seconds": seconds,
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    for name in ("tlt_against_plain", "unshared_against_plain", "capture_against_tlt"):
        values = report[name]
        assert isinstance(values, dict)
        print(f"{name}: {values['median']:.2f}x ({values['low']:.2f} to {values['high']:.2f})")
    dist.destroy_process_group()


def _apart(samples: list[Any], budget: int) -> list[list[Any]]:
    """Rows of the same budget in which no two neighbours have the same prompt."""
    from tlt.packing import pack

    rows = []
    for row in pack([len(s) for s in samples], budget):
        own = sorted((samples[i] for i in row), key=lambda s: s.sample_id.split("/")[1])
        by_prompt: dict[Any, list[Any]] = {}
        for sample in own:
            by_prompt.setdefault(sample.prompt_ids, []).append(sample)
        layers = max(len(group) for group in by_prompt.values())
        if len(by_prompt) == 1:  # nothing between them: a row each
            rows += [[sample] for sample in own]
        else:
            rows.append([g[k] for k in range(layers) for g in by_prompt.values() if k < len(g)])
    return rows


def _padded(samples: list[Any], budget: int) -> list[list[Any]]:
    """Micro-batches of samples of similar length, under the budget with padding."""
    batches: list[list[Any]] = []
    for sample in sorted(samples, key=len, reverse=True):
        if not batches or len(batches[-1][0]) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(sample)
    return batches


if __name__ == "__main__":
    main()
