"""Work for engines in tests: settings, arms, prompts, drafters, and reference answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_process import EngineProcess

from tlt.contracts import SampleRequest, SamplingSpec

if TYPE_CHECKING:
    from tlt.states.buffer import BufferSettings

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


def load_policy(folder: Path) -> Any:
    """Return the model of a folder in float32, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def change(policy: Any, seed: int) -> None:
    """Add noise to all parameters, always the same for a seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def changed_policy(folder: Path, seed: int) -> Any:
    """Return the policy of a folder after `change`."""
    policy = load_policy(folder)
    change(policy, seed)
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


def noisy_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """Return random weights of the same shapes; token ids stay."""
    import torch

    return {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in weights.items()}


def drafter_tensors(folder: Path) -> dict[str, Any]:
    """Return the weights of a drafter as an engine takes them."""
    import torch

    from tlt.drafter.checkpoint import drafter_weights, load_drafter

    drafter = load_drafter(folder)
    return drafter_weights(drafter.state_dict(), drafter.config, torch.float32)


def check_states(
    settings: BufferSettings, policy: Any, drafter: Path, texts: Sequence[tuple[Any, Any]]
) -> None:
    """Check that a buffer holds just the policy's states of these prompts and responses."""
    import torch

    from tlt.drafter.checkpoint import load_drafter
    from tlt.states.buffer import SampleBuffer
    from tlt.states.captured import capture

    layers = load_drafter(drafter).config.aux_layer_ids
    buffer = SampleBuffer(settings)
    until_s = time.monotonic() + 60.0  # a thread stores states beside the engine's work
    while len(buffer.entries()) < len(texts) and time.monotonic() < until_s:
        time.sleep(0.05)
    read = [buffer.read(entry.name) for entry in buffer.entries()]
    kept = {tuple(each.token_ids_T.tolist()): each for each in read if each is not None}
    assert kept.keys() == {(*prompt, *response) for prompt, response in texts}
    for prompt, response in texts:
        own = kept[(*prompt, *response)]
        right = capture(policy, [*prompt, *response], len(prompt), layers)
        assert own.first_position == 0
        assert torch.equal(own.loss_mask_T, right.loss_mask_T)
        for ours, theirs in ((own.aux_TA, right.aux_TA), (own.final_TH, right.final_TH)):
            torch.testing.assert_close(ours[:-1].float(), theirs[:-1].float(), rtol=0.02, atol=0.02)
