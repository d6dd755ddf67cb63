"""How often tokens differ through batch shapes alone, in bfloat16 and in float32.

    tlt models smollm2 --out models/smollm2
    python benchmarks/bfloat16.py

Samples the same requests, with the same seeds, three times: one at a time, eight at a time, and
eight at a time with n-gram drafts. The keyed sampler draws the same tokens from the same logits. So
samples differ only where the logits do, by the order in which a matrix product adds up its terms.
Such a difference is a near-tie: `shortfall` says by how much the other token missed the draw, by
the log-probabilities of the policy in float32. Writes benchmarks/results/bfloat16.json: for each
pair the share of samples that differ, the tokens until the first difference, and the shortfall
there.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import parse_options, save

WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "eight at a time": {"max_num_seqs": 8},
    "n-grams": {"max_num_seqs": 8},
}
NGRAMS = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 3}
PAIRS = (("one at a time", "eight at a time"), ("eight at a time", "n-grams"))


def main() -> None:
    options = parse_options(
        __doc__,
        model="models/smollm2",
        samples=16,
        tokens=64,
        dtypes=["bfloat16", "float32"],
    )
    requests = _requests(options)
    results: dict[str, Any] = {}
    for dtype in options.dtypes:
        drawn: dict[str, list[tuple[int, ...]]] = {}
        num_drafted: dict[str, int] = {}
        for way, arguments in WAYS.items():
            started_s = time.monotonic()
            drawn[way], num_drafted[way] = _sample(options.model, requests, dtype, way, arguments)
            print(f"{dtype}, {way}: {time.monotonic() - started_s:.0f} s", flush=True)
        results[dtype] = {}
        for first, second in PAIRS:
            found = _compare(options.model, requests, drawn[first], drawn[second])
            results[dtype][f"{first} / {second}"] = found | {"draft_tokens": num_drafted[second]}
            print(dtype, first, "/", second, found, flush=True)
        settings = {"samples": options.samples, "tokens": options.tokens, "temperature": 1.0}
        save("bfloat16", {"settings": settings, "results": results})


def _requests(options: Namespace) -> list[Any]:
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    chat = Chat(options.model)
    return [
        SampleRequest(
            str(index),
            tuple(chat.prompt(problem.question)),
            SamplingSpec(max_tokens=options.tokens, seed=index, ignore_eos=True),
        )
        for index, problem in enumerate(problems("chain_sum", options.samples, seed=7))
    ]


def _sample(
    model: str, requests: Sequence[Any], dtype: str, way: str, arguments: dict[str, Any]
) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of all samples, and how many draft tokens were verified."""
    from tlt.config.rollout import EngineConfig
    from tlt.rollout.client import Engine
    from tlt.rollout.offline import ChildEngine

    config = EngineConfig(
        model=model,
        kv_cache_gib=0.5,
        core_group="bfloat16",
        strategy=NGRAMS if way == "n-grams" else {"kind": "off"},
        engine_args={"enforce_eager": True, "dtype": dtype, "max_model_len": 512} | arguments,
    )
    tokens: dict[str, tuple[int, ...]] = {}
    with ChildEngine(config) as engine:
        engine.report()
        engine.call(Engine.submit, requests)
        while len(tokens) < len(requests):
            tokens |= {s.sample_id: s.token_ids for s in engine.call(Engine.take_finished, 60.0)}
        num_drafted = engine.call(Engine.stats).draft_tokens
    return [tokens[request.sample_id] for request in requests], num_drafted


def _compare(
    model: str,
    requests: Sequence[Any],
    first: Sequence[tuple[int, ...]],
    second: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """Return how many samples differ, where each does first, and by how much the draw was close."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.vllm import keyed

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    equal_tokens, shortfalls = [], []
    for request, one, other in zip(requests, first, second, strict=True):
        if one == other:
            continue
        place = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        text = [*request.prompt_token_ids, *one[:place]]
        with torch.no_grad():
            row = policy(torch.tensor([text])).logits[0, -1].numpy()
        key, at = np.uint64(request.sampling.seed), np.float32(1)
        missed = [
            keyed.shortfall(row, key, place, at, token) for token in (one[place], other[place])
        ]
        equal_tokens.append(place)
        shortfalls.append(round(max(missed), 5))
    return {
        "differ": len(equal_tokens),
        "tokens_until_first_difference": equal_tokens,
        "shortfalls": shortfalls,
        "median_shortfall": statistics.median(shortfalls) if shortfalls else None,
        "largest_shortfall": max(shortfalls, default=None),
    }


if __name__ == "__main__":
    main()
