"""The supervised start of a policy on worked solutions.

A raw small model is too random at temperature 1 to be a reasoning policy. A few minutes on worked
solutions teach it to answer in written-out steps, with lengths as heavy-tailed as the problems'
sizes. Training runs in one process, on packed rows, with the loss on the solution's tokens only.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tlt.contracts import Worked
from tlt.hardware import Dtype
from tlt.learner.packed_attention import use_packed_attention
from tlt.packing import epochs


@dataclass(frozen=True, slots=True)
class SftSettings:
    num_steps: int
    row_tokens: int
    """Tokens of one packed row, which is one optimizer step."""
    lr: float
    budget_s: float
    """Seconds after which training stops; the learning rate decays in time for it."""
    seed: int
    dtype: Dtype
    """Dtype of matrix products."""


@dataclass(frozen=True, slots=True)
class SftStep:
    step: int
    loss: float
    """Mean cross-entropy of the row's solution tokens."""
    accuracy: float
    """Share of the solution tokens that the policy finds most likely."""
    num_tokens: int
    elapsed_s: float
    progress: float
    """Share of the optimizer steps or of the time budget, whichever is larger."""


def supervised_start(
    policy: Any,
    samples: Sequence[Worked],
    settings: SftSettings,
    on_step: Callable[[SftStep], None] = lambda step: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train `policy`, a Hugging Face causal LM in float32, in place.

    Matrix products are computed in `settings.dtype`; weights and optimizer stay in float32.
    """
    rows = epochs(
        [len(ids) for ids, _ in samples], settings.row_tokens, random.Random(settings.seed)
    )
    use_packed_attention(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=settings.lr, betas=(0.9, 0.95), fused=True
    )
    policy.train()
    started_at = clock()
    for step in range(settings.num_steps):
        progress = max(step / settings.num_steps, (clock() - started_at) / settings.budget_s)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * warmup_then_cosine(step, progress)
        chosen = [samples[i] for i in next(rows)]
        loss, accuracy = row_loss(policy, chosen, settings.dtype)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        on_step(
            SftStep(
                step=step + 1,
                loss=loss.item(),
                accuracy=accuracy,
                num_tokens=sum(len(ids) for ids, _ in chosen),
                elapsed_s=clock() - started_at,
                progress=progress,
            )
        )
    policy.eval()


WARMUP_STEPS = 20
"""Optimizer steps over which the learning rate rises."""


def warmup_then_cosine(step: int, progress: float) -> float:
    """Return the factor of the highest learning rate: a warm-up, then a decay to a tenth."""
    down = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * down


def row_loss(policy: Any, samples: Sequence[Worked], dtype: Dtype) -> tuple[torch.Tensor, float]:
    device = policy.device
    lengths = [len(token_ids) for token_ids, _ in samples]
    ids = torch.tensor([token for token_ids, _ in samples for token in token_ids], device=device)
    position = torch.cat([torch.arange(length) for length in lengths]).to(device)
    # Position t predicts token t+1: a part is learned from the token before it to its last but one.
    learned = torch.zeros_like(ids, dtype=torch.bool)
    begin = 0
    for token_ids, parts in samples:
        for first, end in parts:
            learned[begin + first - 1 : begin + end - 1] = True
        begin += len(token_ids)
    target = ids.roll(-1)[learned]
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden = policy.model(
            ids[None], position_ids=position[None], segment_lengths=lengths, use_cache=False
        )
        # The head runs only for learned tokens: it is a fifth of a small model's work.
        logits = policy.get_output_embeddings()(hidden.last_hidden_state[0, learned]).float()
    accuracy = (logits.argmax(-1) == target).float().mean().item()
    return F.cross_entropy(logits, target), accuracy
