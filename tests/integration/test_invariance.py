"""In float32, logits depend on the text alone: on no other request, draft, chunk or cache hit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import logits_ledger
import pytest
from engine_process import EngineProcess
from workloads import EngineFactory, load_policy, watch_preemptions

from tlt.contracts import SamplingSpec

pytestmark = pytest.mark.vllm

ARGS = {"enforce_eager": True, "dtype": "float32", "max_model_len": 768, "max_num_seqs": 64}
GREEDY = SamplingSpec(max_tokens=16, temperature=0, ignore_eos=True, logprobs=True)
OFF = {"kind": "off"}

Digests = dict[bytes, set[bytes]]


def ngrams(num_draft_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": num_draft_tokens}


def prompts(count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    return [[rng.randrange(4, 260) for _ in range(length)] for length in lengths]


PROMPTS = [
    *prompts(4, 3, 30, seed=0),
    *prompts(3, 120, 127, seed=1),  # their responses need further blocks of the KV cache
    *prompts(1, 600, 620, seed=2),
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose matrix products sum over more than 1024 inputs, also in the head."""
    from tlt.models import tiny

    out = tmp_path_factory.mktemp("models") / "wide"
    return tiny.make(out, hidden_size=1088, num_layers=2, head_dim=128)


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, wide: Path) -> EngineProcess:
    engine = engines(model=str(wide), strategy=ngrams(8), engine_args=ARGS)
    engine.call(logits_ledger.watch)
    return engine


def digests(engine: EngineProcess, batches: Iterable[list[list[int]]], strategy: Any) -> Digests:
    """Generate batch by batch, and return what the engine computed."""
    engine.call("set_strategy", strategy)
    engine.call(logits_ledger.take)
    for batch in batches:
        engine.generate(batch, GREEDY)
    taken: Digests = engine.call(logits_ledger.take)
    return taken


def alone() -> Iterator[list[list[int]]]:
    return ([prompt] for prompt in PROMPTS)


def differing(first: Digests, second: Digests) -> tuple[int, int]:
    """Return how many texts have different logits, and how many are in both."""
    both = first.keys() & second.keys()
    return sum(len(first[text] | second[text]) > 1 for text in both), len(both)


@pytest.fixture(scope="module")
def reference(engine: EngineProcess) -> Digests:
    """Return the logits of each prompt alone, read in one piece, without drafts."""
    found = digests(engine, alone(), OFF)
    assert len(found) >= len(PROMPTS) * GREEDY.max_tokens * 0.9
    return found


@pytest.mark.gate
def test_batch_size_and_prefix_cache(engine: EngineProcess, reference: Digests) -> None:
    engine.call(logits_ledger.drop_prefixes)
    pairs = [PROMPTS[i : i + 2] for i in range(0, len(PROMPTS), 2)]
    assert differing(reference, digests(engine, pairs, OFF)) == (0, len(reference))
    for batches in (alone(), [PROMPTS]):  # their prefixes are cached
        assert differing(reference, digests(engine, batches, OFF)) == (0, len(reference))


@pytest.mark.gate
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_drafts(engine: EngineProcess, reference: Digests, num_draft_tokens: int) -> None:
    # N-grams find both the greedy responses and other ones.
    engine.generate(PROMPTS, GREEDY)
    engine.generate(PROMPTS, SamplingSpec(max_tokens=16, temperature=2))

    def both_ways() -> list[Digests]:
        found = []
        for batches in (alone(), [PROMPTS]):
            engine.call(logits_ledger.drop_prefixes)
            found.append(digests(engine, batches, ngrams(num_draft_tokens)))
        return found

    found, acceptance = engine.accepted_during(both_ways)
    assert acceptance > 0
    assert acceptance < 1 or num_draft_tokens < 7, "long drafts are wrong somewhere"
    for each in found:
        assert differing(reference, each) == (0, len(reference))


@pytest.mark.gate
def test_chunks_and_preemptions(engines: EngineFactory, wide: Path, reference: Digests) -> None:
    """The KV cache holds the long prompt and three others, until their responses grow."""
    bytes_of_128 = 128 * 2 * 2 * 4 * 128 * 4  # tokens, layers, keys and values, heads, float32
    engine = engines(
        model=str(wide),
        strategy=ngrams(4),
        kv_cache_gib=9 * bytes_of_128 / 2**30,
        engine_args=ARGS | {"max_num_batched_tokens": 64},
    )
    engine.call(logits_ledger.watch)
    engine.call(watch_preemptions)
    for strategy in (OFF, ngrams(4)):
        found = digests(engine, [PROMPTS[::-1]], strategy)
        assert differing(reference, found) == (0, len(reference))
    assert engine.call("num_preemptions") > 0
    engine.close()


@pytest.mark.gate
def test_after_a_weight_update(engine: EngineProcess, wide: Path, reference: Digests) -> None:
    from tlt.node.weights import SharedWeights

    original = load_policy(wide).state_dict()
    louder = {name: 1.01 * tensor for name, tensor in original.items()}
    with SharedWeights(louder.items()) as weights:
        engine.call("update_policy", weights.manifest(), 1)
    first = digests(engine, alone(), OFF)
    assert differing(reference, first)[0] > 0, "the new policy has other logits"
    engine.call(logits_ledger.drop_prefixes)
    assert differing(first, digests(engine, [PROMPTS], ngrams(8))) == (0, len(first))
    with SharedWeights(original.items()) as weights:
        engine.call("update_policy", weights.manifest(), 2)
    assert differing(reference, digests(engine, [PROMPTS], OFF)) == (0, len(reference))
