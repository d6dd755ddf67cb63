"""Work for engines in tests: settings, arms, prompts, drafters, and reference answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_process import EngineProcess

from tlt.contracts import SampleRequest, SamplingSpec

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
SWITCHING_ARMS: list[list[Any]] = [
    ["off", 0],
    *([drafter, k] for drafter in ("ngram", "eagle3") for k in (1, 2, 4, 8)),
]


def random_prompts(count: int, seed: int = 0, vocab: tuple[int, int] = (4, 260)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(*vocab) for _ in range(rng.randint(5, 40))] for _ in range(count)]


def seeded(
    prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]], max_tokens: int
) -> list[SampleRequest]:
    """Return a request for each prompt, with a seed of its own and the settings in turn."""
    requests = []
    for index, prompt in enumerate(prompts):
        spec = SamplingSpec(
            max_tokens=max_tokens, ignore_eos=True, seed=index, **settings[index % len(settings)]
        )
        requests.append(SampleRequest(f"sample/{index}", tuple(prompt), spec))
    return requests


def watch_preemptions(engine: Any) -> None:
    """Count the requests that an engine preempts, as its attribute `num_preemptions`."""
    scheduler = engine.core.llm.engine_core.engine_core.scheduler
    preempt = type(scheduler)._preempt_request
    engine.num_preemptions = 0

    def spied(request: Any, *args: Any, **kwargs: Any) -> None:
        engine.num_preemptions += 1
        preempt(scheduler, request, *args, **kwargs)

    scheduler._preempt_request = spied


def changed_policy(folder: Path, seed: int) -> Any:
    """Return the policy of a folder with noise on all parameters, always the same for a seed."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def load_from_process(
    engine: Any, folder: Path, seed: int, without: str | None = None
) -> dict[str, Any]:
    """Load a `changed_policy` of the engine's own process; return the worker's report."""
    parameters = changed_policy(folder, seed).named_parameters()
    tensors = ((name, p.data) for name, p in parameters if name != without)
    llm = engine.core.llm
    reports = engine.between_steps(lambda: llm.collective_rpc("tlt_load_policy", args=(tensors,)))
    engine.reset_prefix_cache()
    report: dict[str, Any] = reports[0]
    return report


def save_fresh_drafter(policy: Any, out: Path, draft_vocab: int | None = None) -> Path:
    """Save an untrained drafter that drafts all tokens, or the first `draft_vocab` ones."""
    import torch

    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.trainer import fresh_drafter

    head = policy.get_output_embeddings().weight.detach()
    tokens = None if draft_vocab is None else torch.arange(draft_vocab)
    return save_drafter(fresh_drafter(policy.config, head, tokens), out, torch.float32)


def greedy(policy: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """Return the reference: the greedy responses of transformers, prompt by prompt."""
    import torch

    tokens = []
    for prompt in prompts:
        output = policy.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(tuple(output[0, len(prompt) :].tolist()))
    return tokens
