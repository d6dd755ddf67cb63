"""Hidden states captured by an engine equal those of the policy over the finished sample."""

import time
from dataclasses import asdict
from pathlib import Path

import pytest
from workloads import SWITCHING_ARMS, EngineFactory, random_prompts

from speed import limit
from tlt.contracts import Sample, SampleRequest, SamplingSpec

pytestmark = pytest.mark.vllm

NUM_GROUPS, GROUP_SIZE = 6, 4
STORED_S = limit(30.0)


@pytest.mark.parametrize("cache", ["roomy", "preempting"])
def test_states_of_all_samples_are_captured(
    engines: EngineFactory, tiny: Path, tiny_drafter: Path, tmp_path: Path, cache: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.checkpoint import load_drafter
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import capture

    settings = BufferSettings(str(tmp_path / "buffer"), 2**30, max_sample_tokens=4096)
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy={"kind": "random", "arms": SWITCHING_ARMS, "seed": 3},
        capture=asdict(settings),
        kv_cache_gib=0.5 if cache == "roomy" else 0.003,
    )
    # A prefix that all prompts share, and prompts that their groups share.
    prompts = [[7] * 40 + prompt for prompt in random_prompts(NUM_GROUPS)]
    requests = [
        SampleRequest(
            f"{group}/{place}",
            tuple(prompt),
            SamplingSpec(40 + 25 * place, temperature=1.0, ignore_eos=True),
            rl_step=5 if group < NUM_GROUPS - 1 else None,
        )
        for group, prompt in enumerate(prompts)
        for place in range(GROUP_SIZE)
    ]
    engine.call("submit", requests)
    samples: dict[str, Sample] = {}
    while len(samples) < len(requests):
        samples |= {sample.sample_id: sample for sample in engine.call("take_finished", 60.0)}
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    layers = load_drafter(tiny_drafter).config.aux_layer_ids
    buffer = SampleBuffer(settings)
    expected = [r for r in requests if r.rl_step is not None]
    deadline_s = (
        time.monotonic() + STORED_S
    )  # the writer's thread stores states beside the engine's work
    while len(buffer.entries()) < len(expected) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    kept = {}
    for entry in buffer.entries():
        assert entry.rl_step == 5
        found = buffer.read(entry.name)
        assert found is not None
        kept[tuple(found.token_ids_T.tolist())] = found
    assert len(kept) == len(expected)
    assert 0 < engine.stats().captured_samples <= len(expected)
    for request in expected:
        tokens = request.prompt_token_ids + samples[request.sample_id].token_ids
        own = kept[tokens]
        right = capture(policy, tokens, len(request.prompt_token_ids), layers)
        assert own.first_position == 0
        assert torch.equal(own.loss_mask_T, right.loss_mask_T)
        for ours, theirs in ((own.aux_TA, right.aux_TA), (own.final_TH, right.final_TH)):
            torch.testing.assert_close(ours[:-1].float(), theirs[:-1].float(), rtol=0.02, atol=0.02)
