"""Does this process sample from the right distribution under speculation?

Runs vLLM's own rejection sampler, as installed and patched here, on a small known distribution,
and compares frequencies. It takes tens of milliseconds and runs in every worker before the first
request: an engine that fails it may decode greedily but never sample with drafts.
"""

from __future__ import annotations

import math

import torch

NUM_ROWS = 4096
VOCAB_SIZE = 6
TEMPERATURE = 0.7
# Under the null the worst of the cells stays below 5 standard errors all but once in 10^5 runs;
# the fault of the CPU build lies beyond 50.
MAX_SIGMA = 5.0


def sampling_faults(device: torch.device) -> list[str]:
    """What is wrong with sampling under speculation in this process; empty when nothing is."""
    faults = []
    expanded = _expand_floats(device)
    if expanded is not None:
        faults.append(expanded)
    for label, top_p in (("temperature", 1.0), ("top-p", 0.85)):
        sigma = _worst_deviation(device, top_p)
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


def _worst_deviation(device: torch.device, top_p: float) -> float:
    """Largest deviation of the sampled first token from its probability, in standard errors."""
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

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
        logitsprocs=None,
    )
    target = apply_sampling_constraints(logits.repeat(NUM_ROWS, 1), ends, metadata)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = rejection_sample(
            drafts,
            [1] * NUM_ROWS,
            1,
            ends,
            None,
            target,
            torch.zeros(NUM_ROWS, 1, dtype=torch.int32, device=device),
            metadata,
        )
    counts = torch.bincount(output[:, 0].clamp(min=0).long(), minlength=VOCAB_SIZE).tolist()
    worst = 0.0
    for count, probability in zip(counts, expected, strict=False):
        if probability < 1e-9:
            worst = max(worst, math.inf if count else 0.0)
            continue
        error = math.sqrt(probability * (1 - probability) / NUM_ROWS)
        worst = max(worst, abs(count / NUM_ROWS - probability) / error)
    return worst
