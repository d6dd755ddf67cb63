"""Hidden states captured by an engine equal those of the policy over the finished sample."""

from dataclasses import asdict
from pathlib import Path

import pytest
from workloads import SWITCHING_ARMS, EngineFactory, check_states, load_policy, random_prompts

from tlt.contracts import SampleRequest, SamplingSpec

pytestmark = pytest.mark.vllm

NUM_GROUPS, GROUP_SIZE = 6, 4


def test_states_of_all_samples_are_captured(
    engines: EngineFactory, tiny: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """The KV cache is small, so that requests are preempted."""
    from tlt.states.buffer import BufferSettings, SampleBuffer

    settings = BufferSettings(str(tmp_path / "buffer"), 2**30, max_sample_tokens=4096)
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy={"kind": "random", "arms": SWITCHING_ARMS, "seed": 3},
        capture=asdict(settings),
        kv_cache_gib=0.003,
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
    tokens = engine.tokens_of(requests)
    texts = [
        (request.prompt_token_ids, response)
        for request, response in zip(requests, tokens, strict=True)
        if request.rl_step is not None
    ]
    check_states(settings, load_policy(tiny), tiny_drafter, texts)
    assert {entry.rl_step for entry in SampleBuffer(settings).entries()} == {5}
    assert 0 < engine.stats().captured_samples <= len(texts)
