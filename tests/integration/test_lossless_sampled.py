"""Sampling under speculation follows the policy's distribution, and a wrong sampler is caught.

Two-sample chi-square tests compare the first four tokens after one prompt, with and without drafts.
The positive control is vLLM's CPU build without our fix. The tests find the error below, of a token
with probability 0.2, in nine of ten runs.

|                     | all tests | in the gate |
|---------------------|-----------|-------------|
| samples             | 20,000    | 5,000       |
| error that is found | 0.023     | 0.045       |
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from two_sample import same_distribution
from workloads import RESTLESS, SWITCHING_ARMS, TINY_ARGS, EngineFactory

from speed import by_size
from tlt.contracts import SamplingSpec
from tlt.errors import EngineUnsafe

pytestmark = pytest.mark.vllm

SEED_PROMPT = [17, 99, 203, 45]
NUM_SAMPLES = by_size(gate=5_000, all_=20_000)
FIRST = 4
# Eight tests per comparison; a lossless engine fails one comparison in ten thousand.
MIN_P = 1e-4 / 8
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
ARGS = TINY_ARGS | {"max_num_seqs": 256, "max_model_len": 80}
NGRAM = {"min_match": 1, "max_match": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3},
    "ngram": {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 3},
    "switching": {"kind": "random", "arms": SWITCHING_ARMS, "seed": 2},
    "adaptive": RESTLESS,
}

IN_THE_GATE = {"switching"}


def draw(
    engine: EngineProcess, prompt: list[int], settings: dict[str, Any]
) -> list[tuple[int, ...]]:
    sampling = SamplingSpec(max_tokens=FIRST, ignore_eos=True, logprobs=False, **settings)
    return [s.token_ids for s in engine.generate([prompt] * NUM_SAMPLES, sampling)]


@dataclass
class Plain:
    """Samples of vLLM without any drafter."""

    prompt: list[int]
    drawn: dict[str, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def plain(engines: EngineFactory, tiny: Path) -> Plain:
    engine = engines(model=str(tiny), engine_args=ARGS)
    # The model's own text, so that the n-gram lookup finds likely continuations.
    own = SamplingSpec(max_tokens=28, temperature=0.7, seed=1, ignore_eos=True)
    prompt = SEED_PROMPT + list(engine.generate([SEED_PROMPT], own)[0].token_ids)
    drawn = {name: draw(engine, prompt, settings) for name, settings in SETTINGS.items()}
    engine.close()
    return Plain(prompt, drawn)


@pytest.fixture(scope="module")
def drafting(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        max_draft_tokens=8,
        ngram=NGRAM,
        engine_args=ARGS,
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[pytest.mark.gate] if name in IN_THE_GATE else [])
        for name in STRATEGIES
    ],
)
def test_same_distribution(
    plain: Plain, drafting: EngineProcess, settings: str, strategy: str
) -> None:
    drafting.call("set_strategy", STRATEGIES[strategy])
    before = drafting.stats()
    drawn = draw(drafting, plain.prompt, SETTINGS[settings])
    after = drafting.stats()
    # Both outcomes of verification happen thousands of times.
    accepted = after.accepted_tokens - before.accepted_tokens
    assert accepted > NUM_SAMPLES / 20
    assert after.draft_tokens - before.draft_tokens - accepted > NUM_SAMPLES / 20
    p_values = same_distribution(plain.drawn[settings], drawn)
    assert min(p_values.values()) > MIN_P, p_values


def test_probabilistic_drafts_follow_it_too(
    plain: Plain,
    engines: EngineFactory,
    tiny: Path,
    tiny_drafter: Path,
) -> None:
    """The drafter samples its drafts, and vLLM verifies them with its probabilities."""
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy=STRATEGIES["eagle3"],
        engine_args=ARGS | {"speculative_config": {"draft_sample_method": "probabilistic"}},
    )
    drawn = draw(engine, plain.prompt, SETTINGS["temperature 1"])
    engine.close()
    p_values = same_distribution(plain.drawn["temperature 1"], drawn)
    assert min(p_values.values()) > MIN_P, p_values


@pytest.mark.gate
def test_the_test_catches_a_wrong_sampler(
    plain: Plain,
    engines: EngineFactory,
    tiny: Path,
    tiny_drafter: Path,
) -> None:
    """vLLM's CPU build without our fix: refused at start-up, and caught when forced to sample."""
    engine = engines(
        {"TLT_COMPAT_SKIP": "expand"},
        begin=False,
        model=str(tiny),
        drafter=str(tiny_drafter),
        strategy=STRATEGIES["eagle3"],
        engine_args=ARGS,
    )
    report = engine.start()
    assert any("55005" in fault for fault in report["faults"])
    with pytest.raises(EngineUnsafe, match="wrong distribution"):
        engine.submit([plain.prompt], SamplingSpec(max_tokens=4, temperature=1.0))
    # Greedy decoding does not need the broken function.
    engine.generate([plain.prompt], SamplingSpec(max_tokens=4, temperature=0))
    engine.call("__setattr__", "safe_to_sample", True)
    p_values = same_distribution(
        plain.drawn["temperature 0.7, top-p 0.9"],
        draw(engine, plain.prompt, SETTINGS["temperature 0.7, top-p 0.9"]),
    )
    engine.close()
    assert min(p_values.values()) < 1e-12, p_values
