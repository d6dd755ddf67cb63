"""`tlt drafter warmup`: sample from the policy, then train a first drafter on the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.drafter.checkpoint import save_drafter
from tlt.drafter.warmup import WarmupSettings, warm_up
from tlt.rollout.offline import generate


def warm_up_drafter(
    engine: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    out: Path,
    *,
    max_tokens: int,
    temperature: float,
    num_engines: int,
    settings: WarmupSettings,
    dtype: str,
    on_stage: Callable[[str], None],
    on_step: Callable[[int, int, float, list[float]], None],
) -> list[float]:
    """Write a drafter folder; the agreement per draft position at the end of training."""
    import torch
    from transformers import AutoModelForCausalLM

    on_stage(f"sampling {len(prompts)} responses")
    requests = [
        SampleRequest(
            sample_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingSpec(max_tokens=max_tokens, temperature=temperature, logprobs=False),
        )
        for index, prompt in enumerate(prompts)
    ]
    samples = generate(engine, requests, num_engines)
    sequences = [
        (request.prompt_token_ids + sample.token_ids, len(request.prompt_token_ids))
        for request, sample in zip(requests, samples, strict=True)
    ]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    on_stage(f"training on {num_tokens} tokens")
    target_dtype = getattr(torch, dtype)
    policy = AutoModelForCausalLM.from_pretrained(engine.model, dtype=target_dtype)
    recent: list[list[float]] = []

    def note(step: int, total: int, loss: float, agreement: list[float]) -> None:
        recent.append(agreement)
        del recent[:-20]
        on_step(step, total, loss, agreement)

    drafter = warm_up(policy, sequences, settings, note)
    save_drafter(drafter, out, target_dtype)
    return [sum(column) / len(recent) for column in zip(*recent, strict=True)]
