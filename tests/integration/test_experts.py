"""A mixture of experts in a real engine: its samples and weight syncs are those of the policy."""

from pathlib import Path

import logits_ledger
import pytest
from engine_process import EngineProcess
from workloads import (
    EngineFactory,
    changed_policy,
    greedy,
    load_from_process,
    load_policy,
    random_prompts,
    save_fresh_drafter,
    seeded,
)

from tlt.contracts import SamplingSpec
from tlt.learner.experts import by_expert
from tlt.node.weights import SharedWeights

pytestmark = pytest.mark.vllm

GREEDY = SamplingSpec(max_tokens=24, temperature=0, ignore_eos=True)
OFF = {"kind": "off"}
NGRAM = {"min_match": 1, "max_match": 3}
STRATEGIES = [
    {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4},
    {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3},
    {"kind": "random", "arms": [["off", 0], ["ngram", 2], ["eagle3", 4]], "seed": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "experts", num_layers=3, num_experts=8)


@pytest.fixture(scope="module")
def engine(
    engines: EngineFactory, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineProcess:
    """Return an engine with a drafter; it starts only if its policy is the folder's."""
    drafter = save_fresh_drafter(load_policy(model), tmp_path_factory.mktemp("models") / "fresh")
    return engines(model=str(model), drafter=str(drafter), max_draft_tokens=4, ngram=NGRAM)


def test_the_engine_follows_the_learner(engine: EngineProcess, model: Path) -> None:
    """By the names of checkpoints, as the learner sends them, and by those of transformers."""
    prompts = random_prompts(4, seed=5)
    engine.call("set_strategy", OFF)
    before = greedy(load_policy(model), prompts, 24)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == before
    policy = changed_policy(model, 1)
    named = [
        each for name, tensor in policy.named_parameters() for each in by_expert(name, tensor.data)
    ]
    with SharedWeights(named) as weights:
        engine.call("update_policy", weights.manifest(), 1)
    after = greedy(policy, prompts, 24)
    assert after != before
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == after
    assert engine.stats().policy_mismatches == 0
    assert engine.call(load_from_process, model, 2)["differed"] == []
    expected = greedy(changed_policy(model, 2), prompts, 24)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("seed", range(3))
def test_samples_are_equal_with_and_without_drafts(engine: EngineProcess, seed: int) -> None:
    settings = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    requests = seeded(random_prompts(16, seed=seed), settings, 48)
    engine.call("set_strategy", OFF)
    expected = engine.tokens_of(requests)
    assert [engine.tokens_of([each])[0] for each in requests[:4]] == expected[:4]
    for strategy in STRATEGIES:
        engine.call("set_strategy", strategy)
        assert engine.tokens_of(requests) == expected, strategy


def test_logits_depend_on_the_text_alone(engine: EngineProcess) -> None:
    engine.call(logits_ledger.watch)
    prompts = random_prompts(6, seed=9)
    found = []
    for strategy, batches in (
        (OFF, [[prompt] for prompt in prompts]),
        (OFF, [prompts]),
        (STRATEGIES[2], [prompts]),
    ):
        engine.call("set_strategy", strategy)
        engine.call(logits_ledger.drop_prefixes)
        engine.call(logits_ledger.take)
        for batch in batches:
            engine.generate(batch, GREEDY)
        found.append(engine.call(logits_ledger.take))
    first = found[0]
    for other in found[1:]:
        both = first.keys() & other.keys()
        assert len(both) >= len(prompts) * GREEDY.max_tokens * 0.9
        assert not [text for text in both if len(first[text] | other[text]) > 1]


def test_without_the_fix_the_engine_notices_the_wrong_experts(
    engines: EngineFactory, model: Path
) -> None:
    """vLLM 0.32 packs the weights of experts after the first load only."""
    from tlt.errors import WeightMismatch

    engine = engines({"TLT_COMPAT_SKIP": "experts"}, model=str(model), strategy=OFF)
    named = [
        each
        for name, tensor in changed_policy(model, 1).named_parameters()
        for each in by_expert(name, tensor.data)
    ]
    with SharedWeights(named) as weights, pytest.raises(WeightMismatch, match="w13_weight"):
        engine.call("update_policy", weights.manifest(), 1)
    engine.close()
