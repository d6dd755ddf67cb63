"""The draft vocabulary: which of the policy's tokens a drafter may propose.

A small vocabulary makes every draft pass cheaper. Tokens outside it are never drafted, so it has to
cover what the policy writes. The policy's text moves as the policy learns: `drifted` finds a
vocabulary that covers enough more to be worth the change, and `replace` installs it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tlt.drafter.eagle3.model import Eagle3Drafter

MIN_GAIN = 0.01
"""Additional share of the tokens that a new vocabulary must cover."""


def count_tokens(responses: Iterable[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Count how often each token of the policy's vocabulary occurs."""
    token_ids = torch.cat([ids.cpu() for ids in responses])
    return torch.bincount(token_ids, minlength=vocab_size).double()


def choose(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """Return the most frequent tokens, sorted by id; the lowest ids fill the rest."""
    vocab_size = len(counts_V)
    ranked = counts_V - torch.arange(vocab_size) / (10.0 * vocab_size)  # ties go to the lower id
    return ranked.topk(size).indices.sort().values


def coverage(counts_V: torch.Tensor, token_ids: torch.Tensor) -> float:
    """Return the share of the counted tokens that a vocabulary can draft."""
    return (counts_V[token_ids].sum() / counts_V.sum().clamp(min=1)).item()


def drifted(counts_V: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
    """Return a vocabulary of the same size that covers `MIN_GAIN` more, if there is one.

    Among tokens of equal frequency the present ones stay, because few samples show only few tokens.
    """
    preferred_V = counts_V.clone()
    preferred_V[token_ids] += 0.5
    better = choose(preferred_V, len(token_ids))
    gain = coverage(counts_V, better) - coverage(counts_V, token_ids)
    return better if gain >= MIN_GAIN else None


@torch.no_grad()
def replace(
    drafter: Eagle3Drafter,
    optimizer: torch.optim.Optimizer,
    head_VH: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Make the drafter draft from other tokens.

    Tokens that stay keep their row of the drafter's head and its optimizer moments. New tokens
    start from the policy's head.
    """
    old = drafter.draft_token_ids()
    place = torch.searchsorted(old, token_ids).clamp(max=len(old) - 1)
    stays = old[place] == token_ids
    weight = drafter.lm_head.weight
    fresh = head_VH[token_ids].to(weight.dtype)
    weight.copy_(torch.where(stays[:, None], weight[place], fresh))
    for name, moment in optimizer.state[weight].items():
        if name != "step":
            moment.copy_(torch.where(stays[:, None], moment[place], 0.0))
    drafter.set_draft_vocabulary(token_ids)
