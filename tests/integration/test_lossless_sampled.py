"""Samples are the same with and without drafts, token by token, and follow the policy.

Equality is the proof that drafts change nothing: in float32, a request with a seed gets the same
tokens with any drafter, any switching, wrong drafts, and in any batch. What equality cannot tell is
whether the sampler draws from the policy's distribution at all. One chi-squared test does, against
probabilities that transformers computes.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import (
    RESTLESS,
    SWITCHING_ARMS,
    TINY_ARGS,
    EngineFactory,
    drafter_tensors,
    load_policy,
    noisy_weights,
    random_prompts,
    seeded,
    watch_preemptions,
)

from speed import by_size
from tlt.contracts import SampleRequest, SamplingSpec, Text
from tlt.errors import EngineUnsafe
from tlt.node.weights import SharedWeights
from tlt.rollout import loop

pytestmark = pytest.mark.vllm

Tokens = list[tuple[int, ...]]

MAX_TOKENS = 64
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "temperature alone": [{"temperature": 1.0}, {"temperature": 0.7}],
    "top-p and top-k": [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
        {"temperature": 0.0},
        {"temperature": 1.0, "extra": {"min_tokens": 9}, "stop_token_ids": tuple(range(4, 130))},
    ],
}
NGRAM = {"min_match": 1, "max_match": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    "off": {"kind": "off"},
    "eagle3": {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4},
    "ngram": {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4},
    "switching": {"kind": "random", "arms": SWITCHING_ARMS, "seed": 1},
    "adaptive": RESTLESS,
}


def workload(settings: str) -> list[SampleRequest]:
    prompts = random_prompts(by_size(gate=24, all_=48), seed=len(settings))
    return seeded(prompts, SETTINGS[settings], MAX_TOKENS)


@pytest.fixture(scope="module")
def reference(engines: EngineFactory, tiny: Path) -> dict[str, Tokens]:
    """Return the tokens of an engine that knows no drafts at all."""
    engine = engines(model=str(tiny))
    tokens = {name: engine.tokens_of(workload(name)) for name in SETTINGS}
    engine.close()
    for name, drawn in tokens.items():
        assert len(set(drawn)) == len(drawn), name
    assert any(len(sample) < MAX_TOKENS for sample in tokens["top-p and top-k"])
    return tokens


@pytest.fixture(scope="module")
def drafting(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(model=str(tiny), drafter=str(tiny_drafter), max_draft_tokens=8, ngram=NGRAM)


@contextmanager
def both_outcomes(engine: EngineProcess) -> Iterator[None]:
    """Check that many drafts are accepted meanwhile, and many are not."""
    before = engine.stats()
    yield
    after = engine.stats()
    accepted = after.accepted_tokens - before.accepted_tokens
    assert accepted > 100
    assert after.draft_tokens - before.draft_tokens - accepted > 100


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_samples(
    reference: dict[str, Tokens], drafting: EngineProcess, settings: str, strategy: str
) -> None:
    drafting.call("set_strategy", STRATEGIES[strategy])
    if strategy == "off":
        assert drafting.tokens_of(workload(settings)) == reference[settings]
        return
    with both_outcomes(drafting):
        assert drafting.tokens_of(workload(settings)) == reference[settings]


@pytest.mark.gate
def test_same_samples_in_any_order_and_batch(
    reference: dict[str, Tokens], drafting: EngineProcess
) -> None:
    """Requests come in parts of 1 to 9 at a time, in random order, all settings together."""
    drafting.call("set_strategy", STRATEGIES["switching"])
    rng = random.Random(0)
    left = [
        (name, index, SampleRequest(f"{name}/{index}", r.prompt_token_ids, r.sampling))
        for name in SETTINGS
        for index, r in enumerate(workload(name))
    ]
    rng.shuffle(left)
    with both_outcomes(drafting):
        while left:
            part = [left.pop() for _ in range(min(len(left), rng.choice([1, 1, 2, 5, 9])))]
            for (name, index, _), tokens in zip(
                part, drafting.tokens_of([request for _, _, request in part]), strict=True
            ):
                assert tokens == reference[name][index], (name, index)


def wait_for_steps(engine: Any, count: int) -> None:
    """Return once an engine has made so many more steps."""
    goal = engine.stats().steps + count
    give_up = time.monotonic() + 60
    while engine.stats().steps < goal:
        assert time.monotonic() < give_up, "the engine makes no steps"
        time.sleep(0.002)


@pytest.mark.gate
def test_same_samples_while_the_drafter_is_swapped_and_poisoned(
    reference: dict[str, Tokens], drafting: EngineProcess, tiny_drafter: Path
) -> None:
    """Random weights replace the drafter's in mid-sample; acceptance follows the drafter."""
    good = drafter_tensors(tiny_drafter)
    drafting.call("set_strategy", STRATEGIES["eagle3"])
    work = workload("temperature alone")
    _, good_rate = drafting.accepted_during(partial(drafting.tokens_of, work))
    bad = noisy_weights(good)
    with SharedWeights(good.items()) as good_file, SharedWeights(bad.items()) as bad_file:
        drafting.call("submit", work)
        for version, file in enumerate([bad_file, good_file, bad_file]):
            drafting.call(wait_for_steps, 2)
            drafting.call("update_drafter", file.manifest(), version + 1)
        assert drafting.stats().running > 0, "all samples ended before the last swap"
        assert drafting.stats().drafter_version == 3
        samples = drafting.collect([request.sample_id for request in work])
        assert [s.token_ids for s in samples] == reference["temperature alone"]
        for name in SETTINGS:
            tokens, rate = drafting.accepted_during(partial(drafting.tokens_of, workload(name)))
            assert tokens == reference[name]
            assert rate < 0.05, "the drafts are not poisoned"
        drafting.call("update_drafter", good_file.manifest(), 4)
    tokens, rate = drafting.accepted_during(partial(drafting.tokens_of, work))
    assert tokens == reference["temperature alone"]
    assert rate == pytest.approx(good_rate, abs=0.1)


def texts_of(engine: Any, requests: Sequence[SampleRequest]) -> dict[str, list[Any]]:
    """Generate these requests; return what the engine said of each text while it ran."""
    loop.TEXTS_S, texts, num_ended = 0.0, [], 0
    engine.submit(requests)
    while num_ended < len(requests):
        num_ended += len(engine.take_finished(timeout_s=0.01))
        texts += engine.take_texts()
    loop.TEXTS_S = 1.0
    return {
        r.sample_id: [(at, text) for name, at, text in texts if name == r.sample_id]
        for r in requests
    }


@pytest.mark.gate
@pytest.mark.parametrize("strategy", ["off", "switching"])
def test_a_sample_that_another_engine_began_is_continued(
    drafting: EngineProcess, strategy: str
) -> None:
    """Same tokens and log-probabilities, wherever the engine before was lost."""
    settings = [
        *SETTINGS["temperature alone"],
        *SETTINGS["top-p and top-k"][:3],
        {"temperature": 0},
    ]
    work = seeded(random_prompts(24, seed=3), settings, MAX_TOKENS)
    drafting.call("set_strategy", STRATEGIES["off"])
    drafting.call("submit", work)
    whole = drafting.collect([request.sample_id for request in work])
    drafting.call("set_strategy", STRATEGIES[strategy])
    sizes = itertools.cycle((1, 2, 31, 32, 33, 40, MAX_TOKENS - 1))
    begun = []
    for request, sample, size in zip(work, whole, sizes, strict=False):
        text = Text(sample.token_ids[:size], sample.logprobs[:size], policy_version=0)
        begun.append(replace(request, begun=text))
    drafting.call("reset_prefix_cache")
    drafting.call("submit", begun)
    again = drafting.collect([request.sample_id for request in work])
    assert [s.token_ids for s in again] == [s.token_ids for s in whole]
    assert [s.logprobs for s in again] == [s.logprobs for s in whole]
    assert [s.finish_reason for s in again] == [s.finish_reason for s in whole]


@pytest.mark.gate
def test_an_engine_says_what_its_running_samples_have_gained(drafting: EngineProcess) -> None:
    work = workload("temperature alone")[:6]
    drafting.call("set_strategy", STRATEGIES["switching"])
    drafting.call("submit", work)
    whole = {s.sample_id: s for s in drafting.collect([request.sample_id for request in work])}
    for name, texts in drafting.call(texts_of, work).items():
        assert len(texts) > 3
        tokens: list[int] = []
        logprobs: list[float] = []
        for place, text in texts:
            assert place == len(tokens)
            tokens += text.token_ids
            logprobs += text.logprobs
        assert 0 < len(tokens) < MAX_TOKENS
        assert whole[name].token_ids[: len(tokens)] == tuple(tokens)
        assert whole[name].logprobs[: len(tokens)] == tuple(logprobs)
    with_stop = replace(work[0], sampling=replace(work[0].sampling, extra={"stop": ["no such"]}))
    without_seed = replace(work[1], sampling=replace(work[1].sampling, seed=None))
    assert not any(drafting.call(texts_of, [with_stop, without_seed]).values())


@pytest.mark.gate
def test_same_samples_under_preemption_and_with_prompts_in_chunks(
    engines: EngineFactory, drafting: EngineProcess, tiny: Path, tiny_drafter: Path
) -> None:
    """An engine with room for a few requests, and for 96 tokens a step."""
    small = {
        "max_model_len": 256,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
    }
    prompts = [prompt * 3 for prompt in random_prompts(12, seed=8)]
    assert max(map(len, prompts)) > 96
    work = seeded(prompts, [*SETTINGS["temperature alone"], *SETTINGS["top-p and top-k"][:2]], 96)
    drafting.call("set_strategy", STRATEGIES["off"])
    expected = drafting.tokens_of(work)
    tight = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        max_draft_tokens=8,
        ngram=NGRAM,
        strategy=STRATEGIES["switching"],
        engine_args=TINY_ARGS | small | {"num_gpu_blocks_override": 24},
    )
    tight.call(watch_preemptions)
    with both_outcomes(tight):
        assert tight.tokens_of(work) == expected
    assert tight.call("num_preemptions") > 0
    tight.close()


# --- controls and distribution --------------------------------------------------------------------


@pytest.mark.gate
def test_without_the_keyed_sampler_an_engine_is_refused_and_samples_depend_on_drafts(
    reference: dict[str, Tokens], engines: EngineFactory, tiny: Path, tiny_drafter: Path
) -> None:
    """vLLM's own CPU sampler: refused at start-up, and caught when it is forced to sample."""
    engine = engines(
        {"TLT_COMPAT_SKIP": "keyed"},
        begin=False,
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy=STRATEGIES["eagle3"],
    )
    assert engine.start()["faults"]
    with pytest.raises(EngineUnsafe):
        engine.submit([[5, 6, 7]], SamplingSpec(max_tokens=4, temperature=1.0))
    # Greedy decoding needs no sampler.
    engine.generate([[5, 6, 7]], SamplingSpec(max_tokens=4, temperature=0))
    engine.call("__setattr__", "safe_to_sample", True)
    drawn = engine.tokens_of(workload("temperature alone"))
    engine.close()
    same = [a == b for a, b in zip(drawn, reference["temperature alone"], strict=True)]
    assert not any(same)


@pytest.mark.gate
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_policy(drafting: EngineProcess, tiny: Path, temperature: float) -> None:
    """The first two tokens after one prompt, with random arms, against transformers' softmax."""
    drafting.call("set_strategy", STRATEGIES["switching"])
    prompt = random_prompts(1, seed=3)[0]
    num = by_size(gate=4_000, all_=20_000)
    spec = {"temperature": temperature, "logprobs": False}
    drawn = drafting.tokens_of(seeded([prompt] * num, [spec], 2))
    first, pairs = policy_distribution(tiny, prompt, temperature)
    assert fits([a for a, _ in drawn], first) > 1e-5
    assert fits([a * len(first) + b for a, b in drawn], pairs) > 1e-5
    # The same test finds a temperature that is off by a tenth.
    assert (
        fits([a for a, _ in drawn], policy_distribution(tiny, prompt, temperature * 1.1)[0]) < 1e-5
    )


def policy_distribution(tiny: Path, prompt: Sequence[int], temperature: float) -> tuple[Any, Any]:
    """Return the probabilities of the first token [V], and of the first two [V * V]."""
    import torch

    policy = load_policy(tiny)
    texts = [[*prompt, token] for token in range(policy.config.vocab_size)]
    with torch.no_grad():
        logits = policy(torch.tensor(texts)).logits[:, -2:].double()
    first, second = (logits / temperature).softmax(-1).unbind(1)
    return first[0].numpy(), (first[0][:, None] * second).flatten().numpy()


def fits(outcomes: Sequence[int], probabilities: Any) -> float:
    """Return the p-value of a chi-squared test; outcomes expected less than 10 times are pooled."""
    import numpy as np
    from scipy.stats import chisquare

    expected = probabilities * len(outcomes)
    counts = np.bincount(outcomes, minlength=len(expected))
    likely = expected >= 10
    cells = [*counts[likely], counts[~likely].sum()], [*expected[likely], expected[~likely].sum()]
    return float(chisquare(*cells, sum_check=False).pvalue)
