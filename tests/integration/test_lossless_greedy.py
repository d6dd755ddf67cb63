"""Greedy decoding in fp32 gives the same tokens with every strategy; with SmolLM2, samples too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import RESTLESS, SWITCHING_ARMS, EngineFactory, random_prompts, seeded

from tlt.contracts import SampleRequest, SamplingSpec

pytestmark = pytest.mark.vllm

MODES: dict[str, dict[str, Any]] = {
    "off": {"kind": "off"},
    "eagle3": {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4},
    "ngram": {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4},
    "switching": {"kind": "random", "arms": SWITCHING_ARMS, "seed": 1},
    "adaptive": {"kind": "adaptive"},
    "restless": RESTLESS,
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


def run_modes(
    engine: EngineProcess, requests: list[SampleRequest]
) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, float]]:
    tokens, acceptance = {}, {}
    for name, strategy in MODES.items():
        engine.call("set_strategy", strategy)
        tokens[name], acceptance[name] = engine.accepted_during(lambda: engine.tokens_of(requests))
    return tokens, acceptance


def test_tiny(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> None:
    requests = seeded(random_prompts(64), [{"temperature": 0.0}], 128)
    plain = engines(model=str(tiny))
    reference = plain.tokens_of(requests)
    plain.close()
    assert all(len(tokens) == 128 for tokens in reference)
    engine = engines(model=str(tiny), drafter=str(tiny_drafter), max_draft_tokens=8)
    tokens, acceptance = run_modes(engine, requests)
    for name in MODES:
        assert tokens[name] == reference, name
    assert acceptance["off"] == 0.0
    assert acceptance["eagle3"] > 0.2, acceptance
    assert acceptance["ngram"] > 0.2, acceptance
    assert acceptance["switching"] > 0.2, acceptance


@pytest.mark.gate
def test_tiny_ngram_without_a_drafter(engines: EngineFactory, tiny: Path) -> None:
    """A run that has no drafter yet: n-grams alone, under our scheduler."""
    prompts = random_prompts(32, seed=5)
    sampling = SamplingSpec(max_tokens=96, temperature=0, ignore_eos=True)
    engine = engines(
        model=str(tiny), strategy={"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}
    )
    drafted, acceptance = engine.accepted_during(lambda: engine.generate(prompts, sampling))
    engine.call("set_strategy", {"kind": "off"})
    plain = engine.generate(prompts, sampling)
    assert [s.token_ids for s in drafted] == [s.token_ids for s in plain]
    assert acceptance > 0.2


def test_smollm2(
    engines: EngineFactory, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch
    from learning import TINY_SETTINGS, train
    from transformers import AutoModelForCausalLM

    from tlt.drafter import vocabulary
    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.eagle3.config import Eagle3Config
    from tlt.states.captured import capture
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

    # A drafter trained on just these answers: training is quick, and the policy accepts drafts.
    policy = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    layers = Eagle3Config.for_target(policy.config).aux_layer_ids
    seen = [
        capture(policy, [*prompt, *response], len(prompt), layers, torch.float32)
        for prompt, response in zip(prompts, reference, strict=True)
    ]
    counts = vocabulary.count_tokens(map(torch.tensor, reference), policy.config.vocab_size)
    settings = replace(TINY_SETTINGS, num_draft_tokens=2, lr=1e-3)
    trainer = train(policy, seen, 40, settings, vocabulary.choose(counts, 1024))
    folder = save_drafter(trainer.drafter, tmp_path_factory.mktemp("drafter"), torch.float32)

    engine = engines(
        model=str(smollm2), drafter=str(folder), max_draft_tokens=8, engine_args=arguments
    )
    tokens, acceptance = run_modes(engine, requests)
    for name in MODES:
        assert tokens[name] == reference, name
    assert acceptance["eagle3"] > 0.2, acceptance
