"""Our draft model and vLLM's draft the same tokens from the same weights."""

from pathlib import Path
from typing import Any

import pytest
from draft_spies import seen, spy_v1
from workloads import EngineFactory, load_policy, random_prompts

from tlt.contracts import SamplingSpec
from tlt.drafter.eagle3.config import Llama3Rope

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 4
ROPE = Llama3Rope(8.0, 1.0, 4.0, 16)
PLAIN = {"fc_norm": False, "norm_output": False}
FORMS: dict[str, dict[str, Any]] = {
    "new": {},
    "plain": PLAIN,
    "gpt-oss": PLAIN | {"norm_before_residual": True, "norm_before_fc": True, "rope_scaling": ROPE},
    "qwen3": {"qk_norm": True},
}
"""Switches of published drafters, which vLLM and we must understand alike."""


@pytest.mark.parametrize("form", FORMS)
def test_same_drafts_at_every_position(
    form: str, engines: EngineFactory, tiny: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    import torch
    from learning import export_form

    from tlt.drafter.checkpoint import load_drafter

    if FORMS[form]:
        tiny_drafter = export_form(tiny_drafter, tiny, tmp_path, FORMS[form])
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": NUM_DRAFTS},
    )
    engine.call(spy_v1)
    prompts = random_prompts(12, seed=11)
    samples = engine.generate(prompts, SamplingSpec(64, temperature=0, ignore_eos=True))
    drafted = engine.call(seen)["drafts"]
    engine.close()

    policy = load_policy(tiny)
    drafter = load_drafter(tiny_drafter)
    same = total = 0
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = [*prompt, *sample.token_ids]
        with torch.no_grad():
            hidden = policy.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        aux = torch.cat([hidden[i][0] for i in drafter.config.aux_layer_ids], -1)
        for length in range(len(prompt), len(tokens) + 1):
            if drafts := drafted.get(tuple(tokens[:length])):
                ours = draft(drafter, policy, tokens[:length], aux[: length - 1])
                same += sum(a == b for a, b in zip(ours, drafts, strict=True))
                total += NUM_DRAFTS
    assert total > 1000
    assert same == total, f"{same} of {total}"


def draft(drafter: Any, policy: Any, tokens: list[int], aux_TA: Any) -> list[int]:
    """Greedy drafts after `tokens`, whose last one the policy has sampled but not yet seen."""
    import torch

    from tlt.drafter.eagle3.model import Chains

    embedding = policy.get_input_embeddings()
    start = len(tokens) - 2
    chain = list(tokens)
    vocabulary = drafter.draft_token_ids()
    drafts: list[int] = []
    for step in range(NUM_DRAFTS):
        # Room for the chain's own tokens after the last position with a true state.
        size = start + 1 + step
        padded_TA = torch.cat([aux_TA, aux_TA.new_zeros(size - len(aux_TA), aux_TA.shape[1])])
        chains = Chains(torch.tensor([start]), [size])
        with torch.no_grad():
            embeds_TH = embedding(torch.tensor(chain[1 : size + 1]))
            hidden = drafter.unroll(padded_TA, embeds_TH, torch.arange(size), chains, step + 1)
            logits_V = drafter.lm_head(hidden[step][0])
        drafts.append(int(vocabulary[logits_V.argmax()]))
        chain.append(drafts[-1])
    return drafts
