"""Our draft model and vLLM's draft the same tokens from the same weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workloads import load_policy, random_prompts

from tlt.drafter.eagle3.config import Llama3Rope

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 4
ROPE = Llama3Rope(8.0, 1.0, 4.0, 16)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first form": {"norm_before_residual": True, "norm_before_fc": True, "rope_scaling": ROPE},
    "second form": {"fc_norm": True, "norm_output": True, "qk_norm": True},
}
"""Switches of published drafters, which vLLM and we must understand alike."""


@pytest.mark.parametrize("form", FORMS)
def test_same_drafts_at_every_position(
    form: str, tiny: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    import torch
    from learning import export_form

    from speed import limit
    from tlt.drafter.checkpoint import load_drafter

    if form != "plain":
        tiny_drafter = export_form(tiny_drafter, tiny, tmp_path, FORMS[form])
    out = tmp_path / "drafts.json"
    done = subprocess.run(
        [sys.executable, __file__, str(tiny), str(tiny_drafter), str(out)],
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = json.loads(out.read_text())

    policy = load_policy(tiny)
    drafter = load_drafter(tiny_drafter)
    same = total = 0
    for request_id, tokens in recorded["tokens"].items():
        with torch.no_grad():
            hidden = policy.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        aux = torch.cat([hidden[i][0] for i in drafter.config.aux_layer_ids], -1)
        for length, drafts in recorded["drafts"][request_id]:
            if length <= len(tokens):
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


def record(model: str, drafter: str, out: str) -> None:
    """Generate with vLLM and note every draft: (tokens known at the time, the drafts)."""
    import os

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    from tlt.config.rollout import EngineConfig
    from tlt.vllm.args import engine_args

    config = EngineConfig(
        model=model,
        drafter=drafter,
        kv_cache_gib=0.25,
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": NUM_DRAFTS},
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 256},
    )
    llm = LLM(**engine_args(config))
    from tlt.vllm.v1.proposer import SwitchingProposer  # numba comes after vLLM's start

    drafts: dict[str, list[tuple[int, list[int]]]] = {}
    original = SwitchingProposer.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = original(self, *args, **kwargs)
        batch = self.input_batch
        for row, request_id in enumerate(batch.req_ids):
            sampled = [t for t in self.sampled_token_ids[row].tolist() if t >= 0]
            known = int(batch.num_tokens_no_spec[row]) + len(sampled)
            key = request_id.split("-")[0]
            drafts.setdefault(key, []).append((known, proposed[row].tolist()))
        return proposed

    SwitchingProposer.propose = propose  # type: ignore[method-assign]
    prompts = random_prompts(12, seed=11)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = {
        output.request_id: [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
    }
    Path(out).write_text(json.dumps({"tokens": tokens, "drafts": drafts}))


if __name__ == "__main__":
    record(*sys.argv[1:])
