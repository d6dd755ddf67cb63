"""Tokens are the same with every strategy: n-grams alone on the tiny model, all on SmolLM2."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import (
    RESTLESS,
    SWITCHING_ARMS,
    EngineFactory,
    load_policy,
    random_prompts,
    save_fresh_drafter,
    seeded,
)

from tlt.contracts import SamplingSpec

pytestmark = pytest.mark.vllm

OFF = {"kind": "off"}
NGRAM = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}
STRATEGIES: dict[str, dict[str, Any]] = {
    "off": OFF,
    "eagle3": {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4},
    "ngram": NGRAM,
    "switching": {"kind": "random", "arms": SWITCHING_ARMS, "seed": 1},
    "adaptive": RESTLESS,
    "by_batch_size": {
        "kind": "by_batch_size",
        "drafter": "eagle3",
        "schedule": [[8, 8], [16, 4], [40, 1]],
    },
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
]
# Short, because the tiny model soon repeats itself, and then its own text would be enough.
SHORT = SamplingSpec(max_tokens=26, temperature=0, ignore_eos=True)


def draft(
    engine: EngineProcess, strategy: Mapping[str, object], prompts: list[list[int]]
) -> tuple[list[tuple[int, ...]], float]:
    """Return the tokens of each response, and the mean number of tokens per verified draft."""
    engine.call("set_strategy", strategy)
    before = engine.stats()
    samples = engine.generate(prompts, SHORT)
    after = engine.stats()
    num_drafts = after.drafts - before.drafts
    accepted = after.accepted_tokens - before.accepted_tokens
    return [s.token_ids for s in samples], 1 + accepted / num_drafts if num_drafts else 1.0


@pytest.mark.gate
def test_ngrams_of_other_samples_without_a_drafter(engines: EngineFactory, tiny: Path) -> None:
    engine = engines(begin=False, model=str(tiny), strategy=NGRAM)
    assert engine.start()["proposer"] == "LookupProposer"
    prompts = random_prompts(16, seed=21)
    first, alone = draft(engine, NGRAM, prompts)
    again, seen_before = draft(engine, NGRAM, prompts[::-1])
    assert seen_before > 4.6
    assert seen_before > alone + 1
    # The history also holds samples that were decoded without drafts.
    others = random_prompts(16, seed=22)
    plain, _ = draft(engine, OFF, others + prompts)
    drafted, seen_plain = draft(engine, NGRAM, others)
    assert seen_plain > 4.6
    assert drafted == plain[:16]
    assert first == again[::-1] == plain[16:]
    # A measurement can start from nothing.
    engine.call("reset_prefix_cache")
    tokens, forgotten = draft(engine, NGRAM, others)
    assert tokens == drafted
    assert forgotten < seen_plain - 1


def test_smollm2(
    engines: EngineFactory, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The drafts of an untrained drafter of few tokens are wrong; many n-grams are right."""
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.tail import HeavyTail

    arguments = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256}
    chat, sizes = Chat(str(smollm2)), HeavyTail(4, 8, 12)
    prompts = [list(chat.prompt(p.question)) for p in problems("chain_sum", 16, sizes=sizes)]
    requests = seeded(prompts, SETTINGS, 64)
    plain = engines(model=str(smollm2), engine_args=arguments)
    reference = plain.tokens_of(requests)
    plain.close()
    folder = tmp_path_factory.mktemp("drafter")
    drafter = save_fresh_drafter(load_policy(smollm2), folder, draft_vocab=1024)
    engine = engines(
        model=str(smollm2), drafter=str(drafter), max_draft_tokens=8, engine_args=arguments
    )
    for name, strategy in STRATEGIES.items():
        engine.call("set_strategy", strategy)
        tokens, acceptance = engine.accepted_during(lambda: engine.tokens_of(requests))
        assert tokens == reference, name
        assert acceptance > 0.1 or name != "ngram"
