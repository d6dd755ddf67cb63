"""What engines are asked to do in tests: settings, arms, prompts, and the reference answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine_process import EngineProcess

EngineFactory = Callable[..., EngineProcess]
TINY_ARGS = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
}
RESTLESS = {
    "kind": "adaptive",
    "retry_interval_steps": 2,
    "dwell_steps": 1,
    "margin": 0.0,
    "probe_share": 1.0,
    "first_probes_steps": 1e9,
    "switches_per_s": 1e9,
    "known_drafts": 10**9,
}
"""The adaptive strategy without its caution: it tries every drafter all the time."""
SWITCHING_ARMS = [["off", 0]] + [[d, k] for d in ("ngram", "eagle3") for k in (1, 2, 4, 8)]


def random_prompts(count: int, seed: int = 0, vocab: tuple[int, int] = (4, 260)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(*vocab) for _ in range(rng.randint(5, 40))] for _ in range(count)]


def greedy(policy, prompts, max_tokens: int) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """The reference: what transformers says, prompt by prompt."""
    import torch

    tokens = []
    for prompt in prompts:
        output = policy.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(tuple(output[0, len(prompt) :].tolist()))
    return tokens
