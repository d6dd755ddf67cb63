"""The keyed sampler of vLLM's V2 runner, without an engine. `test_lossless_v2.py` has engines.

Triton's interpreter runs vLLM's kernels. What a GPU compiles from the kernels has never run.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import noise_v2
import pytest
from interpreter import interpreted

pytestmark = pytest.mark.vllm


# --- noise ----------------------------------------------------------------------------------------


def drafts_with_noise() -> dict[str, Any]:
    """Return drafts of a drafter that knows the policy's logits, less the noise that it leaves."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from tlt.drafter.agreement import DRAFT_NOISE
    from tlt.vllm.v2.speculator import draw_drafts

    temperature, seeds = torch.full((3,), 0.7), torch.tensor([11, 12, 13])
    slots, positions = torch.tensor([2, 0, -1]), torch.tensor([30, 50, 70])  # padded with -1
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)) * 0.3
    drafted = draw_drafts(DRAFT_NOISE * logits, positions, slots, temperature, seeds, False)
    policy = gumbel_sample(
        logits, slots, temperature, seeds, positions, apply_temperature=True, is_drafting=False
    )
    return {
        "drafts": drafted[:2].tolist(),
        "policy": policy[:2].tolist(),
        "likeliest": logits.argmax(-1)[:2].tolist(),
    }


KEYS = [(seed, position) for seed in (0, 7, 2**62 + 5, 2**63 - 1) for position in (0, 3, 32_767)]


def key_logits() -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.normal(size=(len(KEYS), 40)).astype(np.float32)


def drawn_by_the_kernel() -> list[int]:
    """Return the tokens that vLLM's kernel draws for `KEYS`."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    seeds, positions = (torch.tensor(numbers) for numbers in zip(*KEYS, strict=True))
    drawn = gumbel_sample(
        torch.from_numpy(key_logits()),
        torch.arange(len(KEYS)),
        torch.ones(len(KEYS)),
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
    )
    return drawn.tolist()


def draws() -> dict[str, Any]:
    return {"keys": drawn_by_the_kernel(), **drafts_with_noise()}


def test_drafts_have_the_noise_of_the_draw_that_they_stand_for() -> None:
    """They share its seed, position and temperature."""
    found = interpreted(draws)
    assert found["drafts"] == found["policy"] != found["likeliest"]
    # The noise of `noise_v2`, which the next test examines, is that of the kernel.
    seeds, positions = zip(*KEYS, strict=True)
    assert noise_v2.draw(key_logits(), seeds, positions).tolist() == found["keys"]


@pytest.mark.gate
def test_draws_follow_the_distribution_and_are_independent() -> None:
    """200,000 draws by V2's noise: seeds of samples, each at 20 positions."""
    import numpy as np
    from scipy.stats import chi2_contingency, chisquare

    num_seeds, num_positions = 10_000, 20
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**63 - 1, num_seeds).repeat(num_positions)
    positions = np.tile(np.arange(100, 100 + num_positions), num_seeds)
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0])
    probabilities = np.exp(logits) / np.exp(logits).sum()
    tokens = noise_v2.draw(np.tile(logits, (len(seeds), 1)), seeds, positions)
    counts = np.bincount(tokens, minlength=len(logits))
    assert chisquare(counts, probabilities * len(tokens)).pvalue > 1e-4
    # The test finds a temperature that is off by 2%.
    other = np.exp(logits / 1.02) / np.exp(logits / 1.02).sum()
    assert chisquare(counts, other * len(tokens)).pvalue < 1e-4
    by_sample = tokens.reshape(num_seeds, num_positions)
    pairs = {
        "next position": (by_sample[:, :-1], by_sample[:, 1:]),
        "next sample": (by_sample[:-1], by_sample[1:]),
    }
    for name, (one, two) in pairs.items():
        table = np.zeros((6, 6))
        np.add.at(table, (one.ravel(), two.ravel()), 1)
        assert chi2_contingency(table).pvalue > 1e-4, name


def self_test_results(num_requests: int) -> dict[str, list[str]]:
    """Return the faults that the self-test finds in good samplers and in bad ones."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  pinned memory without a device

    from tlt.vllm.v2 import sampler as sampler_module
    from tlt.vllm.v2 import selftest as selftest_module

    sampler_v2: Any = sampler_module
    selftest_v2: Any = selftest_module
    device = torch.device("cpu")

    def faults(*args: Any) -> list[str]:
        return selftest_v2.sampling_faults(selftest_v2.stand_in(device, *args))

    found = {"keyed": faults()}
    selftest_v2._NUM_INTERPRETED = num_requests
    selftest_v2.SETTINGS = selftest_v2.SETTINGS[:1]
    found["keyed, many"] = faults()
    found["block"] = faults("block")
    found["block, sampled drafts"] = faults("block", True)
    accept = sampler_v2.accept

    def trusting(drawn: Any, inputs: Any, *others: Any) -> Any:
        tokens, num = accept(drawn, inputs, *others)
        tokens[:, 0] = inputs.view(len(tokens), -1)[:, 1]
        return tokens, num

    def refusing(*args: Any) -> Any:
        tokens, num = accept(*args)
        return tokens, torch.ones_like(num)

    for broken in (trusting, refusing):
        sampler_v2.accept = broken
        found[broken.__name__] = faults()
    sampler_v2.accept = accept
    return found


def test_the_self_test_passes_good_samplers_and_finds_faults() -> None:
    found = interpreted(self_test_results, 160)
    for good in ("keyed", "keyed, many", "block", "block, sampled drafts"):
        assert found[good] == [], good
    assert found["trusting"]
    assert found["refusing"]


# --- without the interpreter ----------------------------------------------------------------------


@pytest.mark.gate
def test_a_row_with_a_limit_meets_the_kernel_of_both() -> None:
    """Whatever its neighbours ask for: vLLM's three kernels may round in different ways."""
    import torch

    from tlt.vllm import compat
    from tlt.vllm.v2.sampler import BothLimits

    vocab_size = [96] if compat.is_at_least(0, 33) else []
    states = BothLimits.__new__(BothLimits)
    states.vocab_size = 96
    for name, values in {"top_k": [96, 10, 96], "top_p": [0.8, 1.0, 1.0]}.items():
        tensor = torch.tensor(values)
        setattr(states, name, SimpleNamespace(np=tensor.numpy(), gpu=tensor))
    for rows in ([0], [1], [2], [0, 1, 2]):
        index = torch.tensor(rows)
        top_k, top_p, *rest = states.get_top_k_top_p(index, index.numpy(), *vocab_size)
        assert [top_k is not None, top_p is not None] == [rows != [2]] * 2
        assert rest == [0 in rows] * len(vocab_size)


def made_up_runner(method: str = "standard", kind: Any = None) -> Any:
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    sampler = Sampler.__new__(kind or Sampler)
    sampler.use_flashinfer = sampler.use_xpu_sampler = True
    sampler.sampling_states = SamplingStates.__new__(SamplingStates)
    speculative = SimpleNamespace(
        num_speculative_tokens=3,
        enable_adaptive_verification=False,
        rejection_sample_method=method,
        fly_entropy_threshold=None,
        fly_entropy_top_k=0,
    )
    runner = SimpleNamespace(
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, speculative, "cpu"),
        speculative_config=speculative,
        speculator=SimpleNamespace(shares_noise=False),
        device="cpu",
    )
    return runner


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.ops import topk_topp_triton
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from tlt.errors import ConfigError
    from tlt.vllm.v2.sampler import BothLimits, KeyedVerifier, install

    monkeypatch.setattr(topk_topp_triton, "_SPLIT_MAX_BATCH", 64)
    block = made_up_runner("block")
    install(block)
    assert not isinstance(block.rejection_sampler, KeyedVerifier)
    assert block.sampler.use_flashinfer
    assert not block.speculator.shares_noise, "shared noise is wrong under vLLM's rules"
    assert topk_topp_triton._SPLIT_MAX_BATCH == 64

    runner = made_up_runner()
    install(runner)
    assert isinstance(runner.rejection_sampler, KeyedVerifier)
    assert isinstance(runner.sampler.sampling_states, BothLimits)
    # Fused samplers draw from streams of random numbers.
    assert not runner.sampler.use_flashinfer
    assert not runner.sampler.use_xpu_sampler
    assert runner.speculator.shares_noise
    assert topk_topp_triton._SPLIT_MAX_BATCH == 0

    class Watermarking(Sampler):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match="Watermarking"):
        install(made_up_runner(kind=Watermarking))
    # Without speculation, every setting of vLLM is allowed.
    without_drafts = made_up_runner(kind=Watermarking)
    without_drafts.rejection_sampler = without_drafts.speculative_config = None
    install(without_drafts)
    assert without_drafts.sampler.use_flashinfer


@pytest.mark.gate
def test_acceptance_by_equality() -> None:
    """Against a loop over made-up rows; -1 is never accepted."""
    import torch

    from tlt.vllm.v2.sampler import accept

    rng = random.Random(0)
    for _ in range(200):
        counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 5))]
        drawn = [rng.randrange(2) for _ in range(sum(counts))]
        inputs = [rng.choice([0, 1, 0, 1, -1]) for _ in drawn]
        ends = torch.tensor([0, *counts]).cumsum(0).int()
        tokens, num = accept(torch.tensor(drawn), torch.tensor(inputs).int(), ends, 4)
        assert tokens.shape == (len(counts), 4)
        assert num.dtype == torch.int32
        for row, count in enumerate(counts):
            first = int(ends[row])
            expected = [drawn[first]]
            while len(expected) < count and inputs[first + len(expected)] == expected[-1]:
                expected.append(drawn[first + len(expected)])
            assert tokens[row, : int(num[row])].tolist() == expected
