"""Evaluates drafters: expected acceptance length on held-out samples.

The policy's side of an evaluation is half of the work and the same for every drafter, so that
`prepare_windows` computes it once and `evaluate` reuses it. `compare` says which of two drafters
is better on the same windows; held-out samples change as the policy moves, so that acceptance
lengths of different times do not compare.

Shapes: V vocabulary, H hidden, C chains, n positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.passes import DraftPasses, Row, ShouldStop, check_stop
from tlt.states.captured import Captured

CHAINS_AT_ONCE = 64
"""Distributions over the whole vocabulary held in memory at a time."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts of the drafter's most likely tokens fare, by draft position."""

    agreement: tuple[float, ...]
    """Share of positions where the draft is the policy's most likely token."""
    rates: dict[float, tuple[float, ...]]
    """Per temperature: chance that draft position j is accepted once positions 0..j-1 are."""

    def length(self, temperature: float) -> float:
        """Return the expected tokens per verified draft, including the policy's own token."""
        total = reached = 1.0
        for rate in self.rates[temperature]:
            reached *= rate
            total += reached
        return total


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """The policy's output at n positions, reduced to what evaluating any draft needs."""

    best_n: torch.Tensor
    """The policy's most likely token."""
    log_sum_n: dict[float, torch.Tensor]
    """Per temperature: log of the sum of exp(logit / temperature) over the whole vocabulary."""

    @classmethod
    def of(cls, logits_nV: torch.Tensor, temperatures: Sequence[float]) -> PolicyOutput:
        """Reduce the policy's logits."""
        return cls(
            logits_nV.argmax(-1),
            {t: (logits_nV / t if t != 1 else logits_nV).logsumexp(-1) for t in temperatures if t},
        )

    @classmethod
    def joined(cls, parts: Sequence[PolicyOutput]) -> PolicyOutput:
        """Concatenate the outputs of consecutive positions."""
        return cls(
            torch.cat([part.best_n for part in parts]),
            {t: torch.cat([part.log_sum_n[t] for part in parts]) for t in parts[0].log_sum_n},
        )

    def at(self, places: torch.Tensor) -> PolicyOutput:
        """Return the output at some of the positions."""
        return PolicyOutput(self.best_n[places], {t: x[places] for t, x in self.log_sum_n.items()})


@dataclass(frozen=True, slots=True)
class HeldOutWindow:
    """A held-out sample, or a window of one, on which drafters are evaluated."""

    row: Row
    policy: PolicyOutput
    """The policy's output where the row's chains are verified."""


class AcceptanceMeter:
    """Sums acceptances over rows of held-out samples into an `Acceptance`.

    A draft token d is accepted with the probability p(d) that the policy gives it. The text after
    the chain's start stands for the accepted tokens: position j counts where drafts 0..j-1 equal
    the text. The expected length is exact for text sampled at the same temperature.
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
        policy: PolicyOutput,
        reached_n: torch.Tensor,
    ) -> None:
        """Count the drafts of one position.

        `draft_logits_n` are the policy's logits of the drafts. `reached_n` is true where all
        earlier drafts of the chain equal the text.
        """
        hit_n = policy.best_n == draft_ids_n
        self._hits[step] += hit_n.sum().item()
        self._counts[step] += len(hit_n)
        self._reached[step] += reached_n.sum().item()
        for temperature, sums in self._accepted.items():
            chance_n = hit_n.float()
            if temperature > 0:
                log_sum_n = policy.log_sum_n[temperature]
                chance_n = (draft_logits_n / temperature - log_sum_n).exp().clamp(max=1.0)
            sums[step] += (chance_n * reached_n).sum().item()

    def result(self) -> Acceptance:
        """Return the acceptance over everything that was added."""
        counted = zip(self._hits, self._counts, strict=True)
        rates = {
            t: tuple(a / r if r else 0.0 for a, r in zip(sums, self._reached, strict=True))
            for t, sums in self._accepted.items()
        }
        return Acceptance(tuple(hits / max(count, 1) for hits, count in counted), rates)


@torch.no_grad()
def prepare_windows(
    passes: DraftPasses,
    samples: Sequence[Captured],
    temperatures: Sequence[float],
    should_stop: ShouldStop = lambda: False,
) -> list[HeldOutWindow]:
    """Compute the policy's output over held-out samples, once for all drafters to compare."""
    windows = []
    for sample in samples:
        if not sample.num_chains:
            continue
        row = Row([sample.to(passes.device)])
        outputs = []
        for final_nH in row.final_TH[row.chains.starts + 1].split(CHAINS_AT_ONCE):
            check_stop(final_nH, should_stop)
            with passes.autocast():
                logits_nV = passes.project(final_nH, passes.head_VH)
            outputs.append(PolicyOutput.of(logits_nV, temperatures))
        windows.append(HeldOutWindow(row, PolicyOutput.joined(outputs)))
    return windows


@torch.no_grad()
def evaluate(
    passes: DraftPasses,
    windows: Sequence[HeldOutWindow],
    temperatures: Sequence[float],
    should_stop: ShouldStop = lambda: False,
) -> Acceptance:
    """Evaluate the drafter against the policy's whole vocabulary."""
    meter = AcceptanceMeter(passes.num_draft_tokens, temperatures)
    drafter = passes.drafter
    vocabulary_V = drafter.draft_token_ids()
    for window in windows:
        row = window.row
        starts = row.chains.starts
        with passes.autocast():
            outputs = passes.unroll(row, should_stop)
            reached_C = torch.ones_like(starts, dtype=torch.bool)
            for step, hidden_CH in enumerate(outputs):
                check_stop(hidden_CH, should_stop)
                learned_C = row.learned(step)
                draft_C = vocabulary_V[drafter.lm_head(hidden_CH).argmax(-1)]
                target = torch.searchsorted(starts, starts[learned_C] + step)
                drafted = draft_C[learned_C]
                meter.add(
                    step,
                    drafted,
                    passes.token_logits(drafted, row.final_TH[starts[target] + 1]),
                    window.policy.at(target),
                    reached_C[learned_C],
                )
                text_C = row.token_ids_T[(starts + 2 + step).clamp(max=row.lengths[0] - 1)]
                reached_C = reached_C & (draft_C == text_C)
    return meter.result()


def evaluate_samples(
    passes: DraftPasses, samples: Sequence[Captured], temperatures: Sequence[float]
) -> Acceptance:
    """Evaluate the drafter on samples that no other drafter is evaluated on."""
    return evaluate(passes, prepare_windows(passes, samples, temperatures), temperatures)


def compare(
    passes: DraftPasses,
    published: Mapping[str, torch.Tensor],
    held_out: Sequence[Captured],
    gate: float,
    temperatures: Sequence[float] = (),
) -> tuple[bool, Acceptance]:
    """Compare the drafter with `published` by expected acceptance length at temperature `gate`.

    Return whether the drafter is better, and its own acceptance at `gate` and `temperatures`.
    """
    temperatures = [gate, *temperatures]
    windows = prepare_windows(passes, held_out, temperatures)
    new = evaluate(passes, windows, temperatures)
    with with_weights(passes.drafter, published):
        old = evaluate(passes, windows, [gate])
    return new.length(gate) > old.length(gate), new


@contextmanager
def with_weights(drafter: Eagle3Drafter, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the drafter other weights for the duration of a `with` block."""
    own = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.load_state_dict(weights)
    try:
        yield
    finally:
        drafter.load_state_dict(own)
