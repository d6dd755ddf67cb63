"""One engine: logprobs, prompts read once, timing, limits."""

import time
from pathlib import Path

import pytest
from engine_process import EngineProcess, tokens_read
from workloads import SWITCHING_ARMS, EngineFactory, load_policy, random_prompts

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import ConfigError, LossyError

pytestmark = [pytest.mark.vllm, pytest.mark.gate]


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy={"kind": "random", "arms": SWITCHING_ARMS},
        max_draft_tokens=8,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_under_drafts_equal_transformers(
    engine: EngineProcess, tiny: Path, temperature: float
) -> None:
    import torch

    policy = load_policy(tiny)
    prompts = random_prompts(16, seed=9)
    sampling = SamplingSpec(max_tokens=64, temperature=temperature, ignore_eos=True)
    samples, acceptance = engine.accepted_during(lambda: engine.generate(prompts, sampling))
    assert acceptance > 0.05
    worst = 0.0
    for prompt, sample in zip(prompts, samples, strict=True):
        assert len(sample.logprobs) == len(sample.token_ids) == 64
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *sample.token_ids]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = expected.gather(1, torch.tensor(sample.token_ids).unsqueeze(1))[:, 0]
        worst = max(worst, (expected - torch.tensor(sample.logprobs)).abs().max().item())
    assert worst < 1e-3


def test_samples_of_a_group_read_their_prompt_once(engine: EngineProcess) -> None:
    """All of its whole blocks, in an engine with a drafter, and within one engine step."""
    prompt = [token for found in random_prompts(20, seed=31) for token in found][:100]
    group = [
        SampleRequest(f"group/{i}", tuple(prompt), SamplingSpec(max_tokens=1, seed=i))
        for i in range(8)
    ]
    assert engine.call(tokens_read, group) == 100 + 7 * (100 - 96)


def test_stop_tokens_end_a_sample_which_says_how_it_went(engine: EngineProcess) -> None:
    before = time.time()
    (free,) = engine.generate([[5, 6, 7]], SamplingSpec(max_tokens=20, temperature=0))
    assert free.finish_reason == "length"
    assert free.queued_s >= 0
    assert 0 < free.running_s <= time.time() - before
    assert before <= free.finished_at_s <= time.time()
    stop = free.token_ids[4]
    (ended,) = engine.generate(
        [[5, 6, 7]], SamplingSpec(max_tokens=20, temperature=0, stop_token_ids=(stop,))
    )
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(ended.logprobs) == len(ended.token_ids)


def test_a_batch_is_taken_whole_or_not_at_all(engine: EngineProcess) -> None:
    good = SampleRequest("good", (5,), SamplingSpec(max_tokens=2))
    long = SampleRequest("long", (5,), SamplingSpec(max_tokens=9999))
    lossy = SampleRequest("lossy", (5,), SamplingSpec(max_tokens=5, extra={"min_p": 0.1}))
    with pytest.raises(ConfigError, match=r"engine_args\.max_model_len"):
        engine.call("submit", [good, long])
    with pytest.raises(LossyError, match="min_p"):
        engine.call("submit", [good, lossy])
    assert engine.stats().queued == engine.stats().running == 0
