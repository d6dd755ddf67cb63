"""The draft vocabulary: which of the policy's tokens a drafter may propose.

A small one makes every draft pass cheaper; tokens outside it are never drafted, so it has to cover
what the policy writes. As the policy moves, what it writes moves too: `drifted` says when another
choice would cover enough more to be worth the change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

MIN_GAIN = 0.01


def count_tokens(responses: Iterable[torch.Tensor], vocab_size: int) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for token_ids in responses:
        counts += torch.bincount(token_ids.cpu(), minlength=vocab_size)
    return counts


def choose(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """The most frequent tokens, sorted by id; filled up with the lowest ids."""
    vocab_size = len(counts_V)
    ranked = counts_V - torch.arange(vocab_size) / (10.0 * vocab_size)  # ties go to the lower id
    return ranked.topk(size).indices.sort().values


def coverage(counts_V: torch.Tensor, token_ids: torch.Tensor) -> float:
    """Share of the counted tokens that a vocabulary can draft."""
    return (counts_V[token_ids].sum() / counts_V.sum().clamp(min=1)).item()


def drifted(counts_V: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
    """A vocabulary of the same size that covers at least `MIN_GAIN` more, if there is one."""
    better = choose(counts_V, len(token_ids))
    gain = coverage(counts_V, better) - coverage(counts_V, token_ids)
    return better if gain >= MIN_GAIN else None
