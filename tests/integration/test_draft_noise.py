"""Drafts of a real engine carry the noise of the token that they stand for.

The policy here has the same distribution at every position, and so has its drafter, whose logits
are as much smaller as its share of the noise. A draft then equals the policy's draw exactly if it
was drawn with the right seed, position and temperature. The drafter lacks the tokens of one block
of the noise: where the policy draws one of them, the drafts are rejected from there on.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from engine_process import EngineProcess
from workloads import TINY_ARGS, EngineFactory, load_policy, random_prompts

from tlt.contracts import Sample, SamplingSpec

pytestmark = pytest.mark.vllm

DRAFTED = 256
"""The drafter's vocabulary. The policy has four tokens more: a block of their own."""
K = 4


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> tuple[Path, Path]:
    """Return a policy and a drafter whose distributions do not depend on the text."""
    import torch
    from transformers import AutoTokenizer

    from tlt.drafter.agreement import DRAFT_NOISE
    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.trainer import fresh_drafter

    policy = load_policy(tiny)
    generator = torch.Generator().manual_seed(3)
    vocab, hidden = policy.config.vocab_size, policy.config.hidden_size
    assert vocab == DRAFTED + 4
    logits_V = 2 * torch.randn(vocab, generator=generator)
    logits_V[7] = logits_V[:DRAFTED].logsumexp(0) - 1.5
    logits_V[DRAFTED:] = logits_V[:DRAFTED].logsumexp(0) - 2.5  # each 7% of all
    with torch.no_grad():
        # Every token has the same embedding, of which no layer changes anything.
        policy.get_input_embeddings().weight.copy_(torch.ones(vocab, hidden))
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head = policy.get_output_embeddings().weight
        head.copy_(logits_V[:, None].expand(vocab, hidden) / hidden)
        drafter = fresh_drafter(policy.config, DRAFT_NOISE * head, torch.arange(DRAFTED))
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.midlayer.mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("constant")
    policy.save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "policy")
    return folder / "policy", save_drafter(drafter, folder / "drafter", torch.float32)


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, constant: tuple[Path, Path]) -> EngineProcess:
    """Return an engine whose steps mix decoding with parts of prompts."""
    policy, drafter = constant
    return engines(
        model=str(policy),
        drafter=str(drafter),
        max_draft_tokens=8,
        engine_args=TINY_ARGS | {"max_num_seqs": 6, "max_num_batched_tokens": 48},
    )


def generate(engine: EngineProcess, spec: SamplingSpec) -> tuple[list[Sample], int]:
    """Return samples of different lengths, and the number of verified drafts."""
    before = engine.stats().drafts
    ids = []
    for index, prompt in enumerate(random_prompts(18, seed=2)):
        own = replace(spec, seed=100 + index, max_tokens=20 + 7 * (index % 9))
        ids += engine.submit([prompt], own)
    return engine.collect(ids), engine.stats().drafts - before


def expected_drafts(tokens: tuple[int, ...]) -> int:
    """Return the drafts that a response takes if drafts fail only at tokens that the drafter lacks.

    The prefill gives the first token. Then each engine step gives the drafts up to the first token
    that the drafter lacks, and one token of the policy.
    """
    num_drafts, place = 0, 1
    while place < len(tokens):
        num_drafts += 1
        right = 0
        while right < K and place + right < len(tokens) and tokens[place + right] < DRAFTED:
            right += 1
        place += right + 1
    return num_drafts


@pytest.mark.gate
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_drafts_fail_only_at_tokens_that_the_drafter_lacks(
    engine: EngineProcess, temperature: float
) -> None:
    spec = SamplingSpec(max_tokens=1, ignore_eos=True, temperature=temperature)
    engine.call("set_strategy", {"kind": "off"})
    plain, _ = generate(engine, spec)
    engine.call("set_strategy", {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": K})
    drafted, num_drafts = generate(engine, spec)
    texts = [sample.token_ids for sample in drafted]
    assert texts == [sample.token_ids for sample in plain]
    if temperature > 0:
        lacking = sum(token >= DRAFTED for text in texts for token in text)
        assert 0.05 < lacking / sum(map(len, texts)) < 0.6
    assert num_drafts == sum(map(expected_drafts, texts))
