"""N-grams from other samples: the same tokens, and long drafts for a prompt seen before."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_process import EngineProcess, PooledEngine
from workloads import TINY_ARGS, EngineFactory, random_prompts

from tlt.config.rollout import PoolConfig
from tlt.contracts import Sample, SampleRequest, SamplingSpec
from tlt.rollout.pool import RolloutPool
from tlt.rollout.texts import PART_TOKENS, Lesson, Texts

pytestmark = pytest.mark.vllm

# Short, because this model soon repeats itself, and then its own text would be enough.
GREEDY = SamplingSpec(max_tokens=26, temperature=0, ignore_eos=True)
OFF = {"kind": "off"}
NGRAM = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}
EAGLE3 = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 2}


def run(
    engine: EngineProcess, strategy: Mapping[str, object], prompts: list[list[int]]
) -> tuple[list[tuple[int, ...]], float]:
    """Return the tokens of each response, and the mean number of tokens per verified draft."""
    engine.call("set_strategy", strategy)
    before = engine.stats()
    samples: list[Sample] = engine.generate(prompts, GREEDY)
    after = engine.stats()
    num_drafts = after.drafts - before.drafts
    accepted = after.accepted_tokens - before.accepted_tokens
    return [s.token_ids for s in samples], 1 + accepted / num_drafts if num_drafts else 1.0


def test_without_a_drafter(engines: EngineFactory, tiny: Path) -> None:
    engine = engines(begin=False, model=str(tiny), strategy=NGRAM)
    assert engine.start()["proposer"] == "HistoryProposer"
    prompts = random_prompts(16, seed=21)
    first, alone = run(engine, NGRAM, prompts)
    again, seen_before = run(engine, NGRAM, prompts[::-1])
    assert seen_before > 4.6
    assert seen_before > alone + 1
    # The history also holds samples that were decoded without drafts.
    others = random_prompts(16, seed=22)
    plain, _ = run(engine, OFF, others + prompts)
    drafted, seen_plain = run(engine, NGRAM, others)
    assert seen_plain > 4.6
    assert drafted == plain[:16]
    assert first == again[::-1] == plain[16:]
    # A measurement can start from nothing.
    engine.call("reset_prefix_cache")
    tokens, forgotten = run(engine, NGRAM, others)
    assert tokens == drafted
    assert forgotten < seen_plain - 1


def test_texts_of_another_engine(engines: EngineFactory, tiny: Path) -> None:
    """An engine that learned another engine's samples drafts as if it had generated them."""
    engine = engines(model=str(tiny), strategy=NGRAM)
    prompts = random_prompts(16, seed=25)
    plain, _ = run(engine, OFF, prompts)
    engine.call("reset_prefix_cache")
    lessons = [
        Lesson(tuple(prompt), array("i", tokens))
        for prompt, tokens in zip(prompts, plain, strict=True)
    ]
    nonsense = [Lesson(tuple(prompt), array("i", [9, 10**9, -1])) for prompt in prompts]
    engine.call("learn", lessons + nonsense)
    drafted, taught = run(engine, NGRAM, prompts)
    assert drafted == plain
    assert taught > 4.6


def test_running_responses_can_be_shared(engines: EngineFactory, tiny: Path) -> None:
    engine = engines(model=str(tiny), strategy=NGRAM)
    names = engine.submit(random_prompts(4, seed=27), replace(GREEDY, max_tokens=400))
    parts: dict[str, tuple[int, array[int]]] = {}
    while not parts:
        found = engine.call("running_texts", dict.fromkeys([*names, "unknown"], 5))
        parts = {name: (start, tokens) for name, start, tokens in found}
    samples = {s.sample_id: s.token_ids for s in engine.collect(names)}
    for name, (start, tokens) in parts.items():
        assert start == 5
        assert len(tokens) >= PART_TOKENS
        assert tuple(tokens) == samples[name][5 : 5 + len(tokens)]
    assert engine.call("running_texts", dict.fromkeys(names, 5)) == []


def siblings(epoch: int) -> list[SampleRequest]:
    """Return four prompts with eight samples each, which the epoch does not change."""
    return [
        SampleRequest(
            f"{epoch}/{place}/{index}",
            tuple(prompt),
            SamplingSpec(max_tokens=48, ignore_eos=True, seed=place * 8 + index),
            rl_step=epoch,
        )
        for place, prompt in enumerate(random_prompts(4, seed=26))
        for index in range(8)
    ]


def wrong_texts() -> bytes:
    """Return texts of the prompts that nobody sampled, some of them outside the vocabulary."""
    texts = Texts(1 << 20)
    texts.engine_ready("another")
    texts.rollout_started(siblings(0))
    for number, request in enumerate(siblings(0)[::4]):
        tokens = (5, 6, 10**9) if number % 2 else (5, 6, 7) * 9
        texts.finished(Sample(request.sample_id, tokens, (), "stop", "another", 0, 0, 0, 0))
    return texts.state()


async def test_engines_that_teach_each_other_give_the_same_samples(
    engines: EngineFactory, tiny: Path
) -> None:
    """In every bit, also with wrong texts from disk; and their drafts are better."""
    args = TINY_ARGS | {"max_num_seqs": 4}
    own = [engines(model=str(tiny), strategy=NGRAM, engine_args=args) for _ in range(2)]

    async def rollouts(shared_text_mib: int) -> tuple[dict[str, Any], int]:
        config = PoolConfig(num_engines=2, shared_text_mib=shared_text_mib)
        found, used = {}, set()
        before = sum(engine.stats().accepted_tokens for engine in own)
        async with RolloutPool(config, lambda name: PooledEngine(name, own[int(name[-1])])) as pool:
            pool.texts.restore(wrong_texts() if shared_text_mib else b"{}\n")
            for epoch in range(2):
                async for sample in pool.generate(siblings(epoch)):
                    found[sample.sample_id] = (sample.token_ids, sample.logprobs)
                    used.add(sample.engine)
            assert bool(pool.texts.num_bytes) == bool(shared_text_mib)
        assert used == {"engine-0", "engine-1"}
        accepted = sum(engine.stats().accepted_tokens for engine in own) - before
        for engine in own:
            engine.call("reset_prefix_cache")
        return found, accepted

    apart, accepted_apart = await rollouts(0)
    taught, accepted_taught = await rollouts(64)
    assert len(taught) == 64
    assert taught == apart
    assert accepted_taught > 1.1 * accepted_apart


def test_its_own_text_only(engines: EngineFactory, tiny: Path) -> None:
    engine = engines(model=str(tiny), strategy=NGRAM, ngram={"history_tokens": 0})
    prompts = random_prompts(8, seed=23)
    first, alone = run(engine, NGRAM, prompts)
    again, seen_before = run(engine, NGRAM, prompts)
    assert first == again
    assert seen_before == pytest.approx(alone, abs=0.3)


def test_beside_a_drafter(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> None:
    engine = engines(model=str(tiny), drafter=str(tiny_drafter), strategy=NGRAM)
    prompts = random_prompts(16, seed=24)
    by_drafter, _ = run(engine, EAGLE3, prompts)
    by_history, seen_before = run(engine, NGRAM, prompts)
    assert by_history == by_drafter
    assert seen_before > 4.6


def test_drafts_keep_to_the_limits() -> None:
    from tlt.vllm.ngram.proposer import HistoryProposer

    token_ids: Any = np.zeros((4, 16), dtype=np.int32)
    token_ids[0, :9] = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    token_ids[1, :14] = [*range(1, 12), 1, 2, 3]
    token_ids[2, :4] = [1, 2, 3, 4]
    batch = SimpleNamespace(
        req_ids=["a", "b", "c"],
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        num_prompt_tokens=np.array([2, 2, 4, 0], dtype=np.int32),
        num_tokens_no_spec=np.array([9, 14, 4, 0], dtype=np.int32),
        token_ids_cpu=token_ids,
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=16),
    )
    ngram = {"min_match": 2, "max_match": 4, "history_tokens": 1000}
    proposer = HistoryProposer(config, SimpleNamespace(input_batch=batch), ngram)

    def propose(num_draft_tokens: int) -> list[list[int]]:
        # The last request is still in its prefill: nothing was sampled for it.
        return proposer.propose(
            num_draft_tokens, [[2], [2, 3], []], batch.num_tokens_no_spec, token_ids
        )

    assert propose(0) == [[], [], []]
    assert propose(4) == [[3, 4, 5, 6], [4, 5], []]
    assert propose(2) == [[3, 4], [4, 5], []]
    # "b" ends with text that no call to `propose` has seen; "x" ended while it was preempted.
    token_ids[1, 14:16] = [50, 51]
    batch.num_tokens_no_spec[1] = 16
    proposer.requests_ended({"b", "x"})
    token_ids[0, 9:12] = [2, 3, 50]
    batch.num_tokens_no_spec[0] = 12
    assert propose(4) == [[51], [], []]
