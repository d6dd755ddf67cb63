"""N-grams from other samples: tokens a step, and what a lookup costs.

    python benchmarks/history.py

Samples groups of responses with one engine, speculation off, and replays them offline: a draft is
accepted as far as it equals what was sampled, which has the probability with which rejection
sampling would have accepted it. Every epoch samples the same prompts from the same policy; between
real epochs the policy changes. Then measures lookups in a history of 1,000,000 tokens,
two new tokens per request and call, 8 drafted, half of the requests siblings of known samples.
Writes benchmarks/results/history.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from common import parse_options, save

MAX_TOKENS = 600


def sample(options: Namespace) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, response) pairs in the order of epochs, prompts, siblings."""
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.offline import generate
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.tail import HeavyTail

    chat, sizes = Chat(options.model), HeavyTail(5, 20, 30)
    numbers = {"min_digits": 1, "max_digits": 2}
    asked = problems("chain_sum", options.prompts, seed=77, sizes=sizes, parameters=numbers)
    prompts = [chat.prompt(problem.question) for problem in asked]
    sampling = SamplingSpec(max_tokens=MAX_TOKENS, temperature=1.0)
    requests = [
        SampleRequest(f"{epoch}/{index}/{sibling}", prompt, sampling)
        for epoch in range(options.epochs)
        for index, prompt in enumerate(prompts)
        for sibling in range(options.siblings)
    ]
    arguments = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32}
    config = EngineConfig(
        model=options.model, kv_cache_gib=0.5, core_group="history", engine_args=arguments
    )
    samples = generate(config, requests)
    return [
        (list(request.prompt_token_ids), list(sample.token_ids))
        for request, sample in zip(requests, samples, strict=True)
    ]


def replay(
    samples: Sequence[tuple[list[int], list[int]]],
    history_of: Callable[[int], Any],
    num_drafted: int,
    concurrency: int,
) -> dict[str, float]:
    """Decode the samples, so many at a time, with drafts of the history that each one gets."""
    waiting = list(range(len(samples)))[::-1]
    done: dict[int, int] = {}  # tokens of each running response
    steps = tokens = 0
    while waiting or done:
        while waiting and len(done) < concurrency:
            done[waiting.pop()] = 1
        batches: dict[Any, list[int]] = defaultdict(list)
        for index in done:
            batches[history_of(index)].append(index)
        for history, batch in batches.items():
            texts = np.zeros((len(batch), 2048), dtype=np.int32)
            for row, index in enumerate(batch):
                text = samples[index][0] + samples[index][1][: done[index]]
                texts[row, : len(text)] = text
            num_prompt = [len(samples[index][0]) for index in batch]
            num_tokens = [len(samples[index][0]) + done[index] for index in batch]
            drafts = history.draft(
                [str(index) for index in batch],
                num_prompt,
                num_tokens,
                texts,
                [num_drafted] * len(batch),
            )
            for index, draft in zip(batch, drafts, strict=True):
                rest = samples[index][1][done[index] :]
                good = 0
                while good < min(len(draft), len(rest)) and draft[good] == rest[good]:
                    good += 1
                steps += 1
                tokens += min(good + 1, len(rest))
                done[index] += good + 1
        for index in [i for i in done if done[i] >= len(samples[i][1])]:
            prompt, response = samples[index]
            text = np.array(prompt + response, dtype=np.int32)
            history_of(index).end(str(index), len(prompt), text)
            del done[index]
    return {"tokens_per_step": tokens / steps}


def time_lookups(num_tokens: int, rounds: int = 20, calls: int = 50) -> dict[str, Any]:
    from tlt.vllm.ngram.history import History

    rng = np.random.default_rng(0)
    history = History(num_tokens, 2, 8)

    def text() -> Any:
        return (rng.zipf(1.3, 560) % 20_000).astype(np.int32)

    for number in range(num_tokens // 560):
        if number % 8 == 0:
            base = text()
        sibling = base.copy()
        changed = rng.random(560) < 0.1
        changed[:60] = False
        sibling[changed] = rng.integers(0, 20_000, changed.sum())
        history.end(str(number), 60, sibling)
    result: dict[str, Any] = {"mib": history.num_bytes / 2**20}
    for batch in (1, 32):
        micros = []
        for round_ in range(rounds):
            rows = np.stack([base if row % 2 == 0 else text() for row in range(batch)])
            names = [f"{batch}/{round_}/{row}" for row in range(batch)]
            lengths = np.full(batch, 200)
            history.draft(names, [60] * batch, lengths, rows, [8] * batch)
            started = time.thread_time()
            for _ in range(calls):
                lengths += 2
                history.draft(names, [60] * batch, lengths, rows, [8] * batch)
            micros.append((time.thread_time() - started) / calls * 1e6)
        result[f"batch {batch}"] = {"median_us": statistics.median(micros), "low_us": min(micros)}
    return result


def main() -> None:
    options = parse_options(
        __doc__,
        model="models/smollm2-sft",
        prompts=16,
        siblings=8,
        epochs=2,
        drafted=4,
        concurrency=16,
    )

    from tlt.vllm.ngram.history import History

    samples = sample(options)
    per_epoch = len(samples) // options.epochs
    result: dict[str, Any] = {
        "options": vars(options),
        "num_tokens": sum(len(response) for _, response in samples),
        "replay": {},
        "lookup": {},
    }
    own = defaultdict[int, Any](lambda: History(4096, 2, 8))
    ways: dict[str, tuple[Any, Callable[[int], Any]]] = {"own text": (samples, own.__getitem__)}
    for name, part in (("history, first epoch", samples[:per_epoch]), ("history", samples)):
        shared = History(1_000_000, 2, 8)
        ways[name] = (part, lambda _, shared=shared: shared)
    for name, (part, history_of) in ways.items():
        found = replay(part, history_of, options.drafted, options.concurrency)
        result["replay"][name] = found
        print(name, {key: round(value, 3) for key, value in found.items()})
    result["lookup"]["1000000"] = found = time_lookups(1_000_000)
    print(found)
    save("history", result)


if __name__ == "__main__":
    main()
