"""Loss and metrics of an unrolled drafter against the policy's own distribution.

Pass j of the chain at s predicts token s+2+j, whose true distribution the policy gave at position
s+1+j. Targets are soft, restricted to the draft vocabulary. Later passes weigh less because a draft
is only as long as its first mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

STEP_DECAY = 0.8


def unrolled_loss(
    draft_logits: Sequence[torch.Tensor], target_probs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Cross-entropy of [n_j, V] draft logits against the policy's distributions, over passes j."""
    total = draft_logits[0].new_zeros((), dtype=torch.float32)
    weight_sum = 0.0
    for step, (drafted, target) in enumerate(zip(draft_logits, target_probs, strict=True)):
        if not len(drafted):
            continue
        weight = STEP_DECAY**step
        total = total + weight * F.cross_entropy(drafted.float(), target)
        weight_sum += weight
    return total / max(weight_sum, 1.0)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts of the drafter's most likely tokens would fare, by draft position."""

    agreement: tuple[float, ...]
    """Share of positions where the draft is the policy's most likely token."""
    rates: dict[float, tuple[float, ...]]
    """Per temperature: chance that the draft at position j is accepted once those before it are."""

    def length(self, temperature: float) -> float:
        """Expected tokens per verified draft, the policy's own one included."""
        total = reached = 1.0
        for rate in self.rates[temperature]:
            reached *= rate
            total += reached
        return total


@dataclass(frozen=True, slots=True)
class Answers:
    """What the policy says at n positions, whoever drafts: enough to judge any draft by."""

    best_n: torch.Tensor
    """Its most likely token."""
    log_sum_n: dict[float, torch.Tensor]
    """Per temperature: log of the sum of exp(logit / temperature) over the whole vocabulary."""

    @classmethod
    def of(cls, logits_nV: torch.Tensor, temperatures: Sequence[float]) -> Answers:
        return cls(
            logits_nV.argmax(-1),
            {t: (logits_nV / t if t != 1 else logits_nV).logsumexp(-1) for t in temperatures if t},
        )

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        return cls(
            torch.cat([part.best_n for part in parts]),
            {t: torch.cat([part.log_sum_n[t] for part in parts]) for t in parts[0].log_sum_n},
        )

    def at(self, places: torch.Tensor) -> Answers:
        return Answers(self.best_n[places], {t: x[places] for t, x in self.log_sum_n.items()})


class AcceptanceMeter:
    """Sums over rows of held-out samples; see `Acceptance`.

    A draft token d is accepted with the probability p(d) the policy gives it. The text after the
    chain's start stands for the accepted tokens: position j counts where drafts 0..j-1 equal it.
    For text sampled at the same temperature that makes the expected length exact.
    """

    def __init__(self, num_steps: int, temperatures: Sequence[float]) -> None:
        self._hits = [0.0] * num_steps
        self._counts = [0] * num_steps
        self._accepted = {t: [0.0] * num_steps for t in temperatures}
        self._reached = [0.0] * num_steps

    def add(
        self,
        step: int,
        draft_ids_n: torch.Tensor,
        draft_logits_n: torch.Tensor,
        answers: Answers,
        reached_n: torch.Tensor,
    ) -> None:
        """`draft_logits_n` the policy's, of the drafts; `reached_n` drafts before were right."""
        hit_n = answers.best_n == draft_ids_n
        self._hits[step] += hit_n.sum().item()
        self._counts[step] += len(hit_n)
        self._reached[step] += reached_n.sum().item()
        for temperature, sums in self._accepted.items():
            chance_n = hit_n.float()
            if temperature > 0:
                log_sum_n = answers.log_sum_n[temperature]
                chance_n = (draft_logits_n / temperature - log_sum_n).exp().clamp(max=1.0)
            sums[step] += (chance_n * reached_n).sum().item()

    def result(self) -> Acceptance:
        return Acceptance(
            agreement=tuple(
                hits / max(count, 1) for hits, count in zip(self._hits, self._counts, strict=True)
            ),
            rates={
                t: tuple(a / r if r else 0.0 for a, r in zip(sums, self._reached, strict=True))
                for t, sums in self._accepted.items()
            },
        )
