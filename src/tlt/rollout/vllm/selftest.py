"""Self-test: does this process sample from the right distribution under speculation?

The test runs vLLM's own rejection sampler, as installed and patched here, and the lean one of CPU
engines on a small known distribution, and compares frequencies. It takes tens of milliseconds, and
runs in every worker before the first request. An engine that fails it may decode greedily, but
never sample with drafts.
"""

from __future__ import annotations

import math
from typing import Any

import torch

NUM_ROWS = 4096
VOCAB_SIZE = 6
TEMPERATURE = 0.7
# A correct sampler exceeds 5 standard errors in any cell once in 10^5 runs; the fault of the CPU
# build exceeds 50.
MAX_SIGMA = 5.0


def sampling_faults(device: torch.device) -> list[str]:
    """Return the faults of sampling under speculation in this process."""
    faults = []
    expanded = _expand_floats(device)
    if expanded is not None:
        faults.append(expanded)
    for label, top_p, lean in (
        ("temperature", 1.0, False),
        ("top-p", 0.85, False),
        ("the lean sampler", 1.0, True),
    ):
        sigma = _worst_deviation(device, top_p, lean)
        if not sigma < MAX_SIGMA:
            faults.append(f"rejection sampling with {label} is off by {sigma:.0f} standard errors")
    return faults


def _expand_floats(device: torch.device) -> str | None:
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([0.5, 0.0, 0.25], device=device)
    ends = torch.tensor([2, 3, 5], dtype=torch.int32, device=device)
    got = rejection_sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    want = [0.5, 0.5, 1.0, 0.25, 0.25]
    if got.tolist() != want:
        return "settings per draft token are not expanded (vllm-project/vllm#55005)"
    return None


def _worst_deviation(device: torch.device, top_p: float, lean: bool) -> float:
    """Return the largest deviation of a token's frequency, in standard errors."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0], device=device)
    scaled = (logits / TEMPERATURE).softmax(-1)
    kept = scaled.cumsum(-1) - scaled < top_p
    expected = (scaled * kept / (scaled * kept).sum()).tolist()

    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, 3, (NUM_ROWS,), generator=generator, dtype=torch.int32).to(device)
    ends = torch.arange(1, NUM_ROWS + 1, dtype=torch.int32, device=device)
    metadata = SamplingMetadata(
        temperature=torch.full((NUM_ROWS,), TEMPERATURE, device=device),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((NUM_ROWS,), top_p, device=device) if top_p < 1 else None,
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sample = _lean_sample if lean else _vllm_sample
        output = sample(drafts, ends, logits, metadata)
    counts = torch.bincount(output[:, 0].clamp(min=0).long(), minlength=VOCAB_SIZE).tolist()
    worst = 0.0
    for count, probability in zip(counts, expected, strict=False):
        if probability < 1e-9:
            worst = max(worst, math.inf if count else 0.0)
            continue
        error = math.sqrt(probability * (1 - probability) / NUM_ROWS)
        worst = max(worst, abs(count / NUM_ROWS - probability) / error)
    return worst


def _vllm_sample(
    drafts: torch.Tensor, ends: torch.Tensor, logits_V: torch.Tensor, metadata: Any
) -> torch.Tensor:
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

    num = len(drafts)
    target = apply_sampling_constraints(logits_V.repeat(num, 1), ends, metadata)
    bonus = torch.zeros(num, 1, dtype=torch.int32, device=drafts.device)
    return rejection_sample(drafts, [1] * num, 1, ends, None, target, bonus, metadata)


def _lean_sample(
    drafts: torch.Tensor, ends: torch.Tensor, logits_V: torch.Tensor, metadata: Any
) -> torch.Tensor:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from tlt.rollout.vllm.sampler import LeanRejectionSampler

    num = len(drafts)
    rows = torch.arange(2 * num, device=drafts.device)
    drafted = SpecDecodeMetadata(drafts, [1] * num, ends, 2 * ends, rows[::2], rows[1::2], rows)
    sampler = LeanRejectionSampler(Sampler())
    return sampler(drafted, None, logits_V.repeat(2 * num, 1), metadata).sampled_token_ids
