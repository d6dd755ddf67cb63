"""Samples of word problems with their hidden states, for benchmarks of drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.drafter.eagle3.config import default_aux_layers
from tlt.states.captured import Captured, capture

TASK = "word_problems"


@dataclass(frozen=True, slots=True)
class Solved:
    """The policy's answer to one problem."""

    states: Captured
    reward: float


def solved(
    model: Path, num_problems: int, seed: int, purpose: str, max_tokens: int
) -> list[Solved]:
    """Return the policy's samples at temperature 1, one per problem, with their states.

    Two engines in float32 sample them: the same problems and weights give the same samples.
    """
    from transformers import AutoModelForCausalLM

    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.offline import generate
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems, score

    chat = Chat(str(model))
    sampling = SamplingSpec(max_tokens=max_tokens, temperature=1.0, logprobs=False)
    asked = problems(TASK, num_problems, seed, purpose)
    requests = [
        SampleRequest(str(index), chat.prompt(problem.question), sampling)
        for index, problem in enumerate(asked)
    ]
    arguments = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": max(len(each.prompt_token_ids) for each in requests) + max_tokens,
        "max_num_seqs": 64,
    }
    config = EngineConfig(model=str(model), kv_cache_gib=1, engine_args=arguments)
    samples = generate(config, requests, num_engines=2)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    layers = default_aux_layers(policy.config.num_hidden_layers)
    found = []
    for problem, request, sample in zip(asked, requests, samples, strict=True):
        prompt = list(request.prompt_token_ids)
        states = capture(policy, [*prompt, *sample.token_ids], len(prompt), layers)
        found.append(Solved(states, score(problem, chat.tokenizer.decode(sample.token_ids))))
    return found
