"""Self-test: does this process sample from the right distribution under speculation?

The test runs the sampler of this process on a small known distribution, and compares frequencies:
the keyed sampler of CPU engines, or the rejection sampler of vLLM's V1 runner as installed here.
The keyed sampler must also draw the same tokens with any drafts. The test takes tens of
milliseconds, and runs in every worker before the first request. An engine that fails it may decode
greedily, but never sample with drafts. `v2.selftest` is the test for vLLM's V2 runner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

NUM_ROWS = 4096
LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0]
TEMPERATURE = 0.7
# A correct sampler exceeds 5 standard errors in any cell once in 10^5 runs; the fault of the CPU
# build exceeds 50.
MAX_SIGMA = 5.0
SETTINGS = (("temperature", 1.0), ("top-p", 0.85))
"""Names of the tested settings, each with its top-p."""


def sampling_faults(device: torch.device, is_keyed: bool) -> list[str]:
    """Return the faults of sampling under speculation in this process."""
    faults = []
    if not is_keyed and (expanded := _expand_floats(device)) is not None:
        faults.append(expanded)
    for label, top_p in SETTINGS:
        temperature_B = torch.full((NUM_ROWS,), TEMPERATURE, device=device)
        top_p_B = torch.full((NUM_ROWS,), top_p, device=device) if top_p < 1 else None
        metadata = sampling_metadata(temperature_B, top_p_B)
        if is_keyed:
            output = _keyed_sample(_drafts(0), metadata)
            if not torch.equal(output, _keyed_sample(_drafts(1), metadata)):
                faults.append(f"tokens sampled with {label} depend on the drafts")
        else:
            with _seeded(device):
                output = _vllm_sample(_drafts(0).to(device), metadata)
        sigma = worst_deviation(output, top_p)
        if not sigma < MAX_SIGMA:
            faults.append(f"sampling with {label} is off by {sigma:.0f} standard errors")
    return faults


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seed the device's random numbers for a while, and give it back its own state.

    Engines whose self-test left the same state behind would draw from the same noise.
    """
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(0)
    try:
        yield
    finally:
        generator.set_state(state)


def _expand_floats(device: torch.device) -> str | None:
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([0.5, 0.0, 0.25], device=device)
    ends = torch.tensor([2, 3, 5], dtype=torch.int32, device=device)
    got = rejection_sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    want = [0.5, 0.5, 1.0, 0.25, 0.25]
    if got.tolist() != want:
        return "settings per draft token are not expanded (vllm-project/vllm#55005)"
    return None


def _drafts(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (NUM_ROWS,), generator=generator, dtype=torch.int32)


def sampling_metadata(temperature_B: torch.Tensor, top_p_B: torch.Tensor | None = None) -> Any:
    """Return vLLM's settings of a batch in which nothing else is asked for."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    return SamplingMetadata(
        temperature=temperature_B,
        all_greedy=False,
        all_random=True,
        top_p=top_p_B,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def worst_deviation(tokens: torch.Tensor, top_p: float) -> float:
    """Return the largest deviation of a token's frequency, in standard errors."""
    scaled = (torch.tensor(LOGITS) / TEMPERATURE).softmax(-1)
    kept = scaled.cumsum(-1) - scaled < top_p
    expected = (scaled * kept / (scaled * kept).sum()).tolist()
    counts = torch.bincount(tokens.cpu().clamp(min=0).long(), minlength=len(LOGITS)).tolist()
    worst = 0.0
    for count, probability in zip(counts, expected, strict=False):
        if probability < 1e-9:
            worst = max(worst, math.inf if count else 0.0)
            continue
        error = math.sqrt(probability * (1 - probability) / len(tokens))
        worst = max(worst, abs(count / len(tokens) - probability) / error)
    return worst


def _vllm_sample(drafts: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the first token of every request, each with one draft, by vLLM's own sampler."""
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

    num, device = len(drafts), drafts.device
    ends = torch.arange(1, num + 1, dtype=torch.int32, device=device)
    logits = torch.tensor(LOGITS, device=device).repeat(num, 1)
    target = apply_sampling_constraints(logits, ends, metadata)
    bonus = torch.zeros(num, 1, dtype=torch.int32, device=device)
    return rejection_sample(drafts, [1] * num, 1, ends, None, target, bonus, metadata)[:, 0]


class _NumberedKeys:
    watch: Any = None

    def of_batch(self, num_requests: int) -> tuple[Any, Any]:
        return np.arange(num_requests, dtype=np.uint64), np.zeros(num_requests, np.int64)


def _keyed_sample(drafts: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the first token of every request, each with one draft, by the keyed sampler."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from tlt.vllm.v1.sampler import KeyedSampler, KeyedVerifier

    num = len(drafts)
    rows = torch.arange(2 * num)
    ends = torch.arange(1, num + 1, dtype=torch.int32)
    drafted = SpecDecodeMetadata(drafts, [1] * num, ends, 2 * ends, rows[::2], rows[1::2], rows)
    verifier = KeyedVerifier(KeyedSampler(_NumberedKeys(), Sampler()))
    logits = torch.tensor(LOGITS).repeat(2 * num, 1)
    return verifier(drafted, None, logits, metadata).sampled_token_ids[:, 0]
