"""A first drafter, trained offline on the policy's own samples.

Takes finished samples (token ids), runs the policy over them once for its hidden states, and
fits the drafter to the policy's distribution. Minutes for a small model; a run that starts
without a drafter does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.loss import unrolled_loss
from tlt.drafter.eagle3.model import Eagle3Drafter


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    draft_vocab_size: int | None = None
    num_steps: int = 4
    """Passes unrolled per chain."""
    epochs: int = 4
    batch_tokens: int = 2048
    lr: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CapturedSample:
    """One sample with what the policy computed over it, on CPU in the policy's dtype."""

    token_ids: torch.Tensor
    num_prompt_tokens: int
    aux_TA: torch.Tensor
    final_TH: torch.Tensor


def draft_vocabulary(
    samples: Sequence[tuple[Sequence[int], int]], vocab_size: int, draft_vocab_size: int
) -> torch.Tensor:
    """The most frequent tokens of the responses, filled up with the lowest ids."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for token_ids, num_prompt_tokens in samples:
        ids = torch.tensor(list(token_ids[num_prompt_tokens:]), dtype=torch.long)
        counts += torch.bincount(ids, minlength=vocab_size)
    counts -= torch.arange(vocab_size) / (10.0 * vocab_size)  # ties go to the lower id
    return counts.topk(draft_vocab_size).indices.sort().values


@torch.no_grad()
def capture(
    policy: Any, samples: Sequence[tuple[Sequence[int], int]], aux_layer_ids: Sequence[int]
) -> list[CapturedSample]:
    """Run the policy over each sample and keep the states the drafter learns from."""
    captured = []
    for token_ids, num_prompt_tokens in samples:
        ids = torch.tensor([list(token_ids)])
        states = policy.model(ids, output_hidden_states=True)
        hidden = states.hidden_states
        captured.append(
            CapturedSample(
                token_ids=ids[0],
                num_prompt_tokens=num_prompt_tokens,
                aux_TA=torch.cat([hidden[i][0] for i in aux_layer_ids], -1),
                final_TH=states.last_hidden_state[0],
            )
        )
    return captured


def warm_up(
    policy: Any,
    samples: Sequence[tuple[Sequence[int], int]],
    settings: WarmupSettings,
    on_step: Callable[[int, int, float, list[float]], None] | None = None,
) -> Eagle3Drafter:
    """Train a drafter for `policy` (a Hugging Face causal LM) on (token ids, prompt length)."""
    torch.manual_seed(settings.seed)
    config = Eagle3Config.for_target(policy.config, settings.draft_vocab_size)
    dtype = policy.dtype
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = Eagle3Drafter(config)
    vocabulary = draft_vocabulary(samples, config.vocab_size, config.draft_vocab_size)
    drafter.set_draft_vocabulary(vocabulary)
    with torch.no_grad():
        # The policy's own head and the mean of the fused states are a good place to start.
        drafter.lm_head.weight.copy_(head[vocabulary])
        blocks = len(config.aux_layer_ids)
        eye = torch.eye(config.hidden_size) / blocks
        drafter.fc.weight.copy_(eye.repeat(1, blocks))
    data = capture(policy, samples, config.aux_layer_ids)

    optimizer = torch.optim.AdamW(drafter.parameters(), lr=settings.lr, betas=(0.9, 0.95))
    batches = _batches(data, settings)
    total = len(batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, total_steps=total, pct_start=min(0.1, 10 / total)
    )
    for index, batch in enumerate(batches):
        aux, tokens, final, mask, attend, position = _collate(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            draft_logits = drafter.unroll(
                aux.float(),
                embedding[tokens.roll(-1, 1)].float(),
                attend,
                position,
                settings.num_steps,
            )
            with torch.no_grad():
                full_logits = final @ head.T
        result = unrolled_loss(
            draft_logits,
            full_logits[..., vocabulary],
            full_logits.argmax(-1),
            vocabulary,
            mask,
        )
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if on_step is not None:
            on_step(index + 1, total, result.loss.item(), result.agreement)
    return drafter


def _batches(data: list[CapturedSample], settings: WarmupSettings) -> list[list[CapturedSample]]:
    """Samples of similar length together, batches in random order, `epochs` times over."""
    generator = torch.Generator().manual_seed(settings.seed)
    order = sorted(data, key=lambda s: len(s.token_ids))
    groups: list[list[CapturedSample]] = []
    for sample in order:
        if not groups or (len(groups[-1]) + 1) * len(sample.token_ids) > settings.batch_tokens:
            groups.append([])
        groups[-1].append(sample)
    return [
        groups[i]
        for _ in range(settings.epochs)
        for i in torch.randperm(len(groups), generator=generator).tolist()
    ]


def _collate(batch: list[CapturedSample]) -> tuple[torch.Tensor, ...]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([s.token_ids for s in batch], batch_first=True)
    aux = pad([s.aux_TA for s in batch], batch_first=True)
    final = pad([s.final_TH for s in batch], batch_first=True)
    length = tokens.shape[1]
    position = torch.arange(length).expand_as(tokens)
    # Learn the policy's predictions of response tokens: those at the prompt's last token onward.
    starts = torch.tensor([s.num_prompt_tokens - 1 for s in batch]).unsqueeze(1)
    ends = torch.tensor([len(s.token_ids) for s in batch]).unsqueeze(1)
    mask = (position >= starts) & (position < ends)
    attend = torch.ones(length, length, dtype=torch.bool).tril().expand(len(batch), -1, -1)
    return aux, tokens, final, mask, attend, position
