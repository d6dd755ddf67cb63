"""N-grams from other samples: the same tokens, and long drafts for a prompt seen before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_process import EngineProcess
from workloads import EngineFactory, random_prompts

from tlt.contracts import Sample, SamplingSpec

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
    assert engine.start()["proposer"] == "LookupProposer"
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
    from tlt.vllm.ngram import on_v1

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
    proposer = on_v1(config, SimpleNamespace(input_batch=batch), ngram)

    def propose(num_draft_tokens: int) -> list[list[int]]:
        # The last request is still in its prefill: nothing was sampled for it.
        return proposer.propose(
            num_draft_tokens, [[2], [2, 3], []], batch.num_tokens_no_spec, token_ids
        )

    assert propose(4) == [[3, 4, 5, 6], [4, 5], []]
    assert propose(2) == [[3, 4], [4, 5], []]
    # "b" ends with text that no call to `propose` has seen; "x" ended while it was preempted.
    token_ids[1, 14:16] = [50, 51]
    batch.num_tokens_no_spec[1] = 16
    proposer.requests_ended({"b": (2, token_ids[1].tolist())})
    proposer.drop({"x"})
    token_ids[0, 9:12] = [2, 3, 50]
    batch.num_tokens_no_spec[0] = 12
    assert propose(4) == [[51], [], []]
