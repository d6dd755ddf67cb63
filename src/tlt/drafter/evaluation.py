"""Evaluates drafters: expected acceptance length on held-out samples.

The policy's side of an evaluation is half of the work and the same for every drafter:
`prepare_windows` computes it once and `evaluate` reuses it. `compare` says which of two drafters is
better on the same windows. Held-out samples change as the policy moves, so acceptance lengths of
different times cannot be compared.

Shapes: V vocabulary, D draft vocabulary, K likeliest tokens, H hidden, C chains, n positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tlt.drafter.agreement import DRAFT_NOISE, LIKELIEST, joint_log_chances
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.passes import DraftPasses, Row, ShouldStop, check_stop
from tlt.states.captured import Captured

CHAINS_AT_ONCE = 64
"""Distributions over the whole vocabulary held in memory at a time."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of the drafter's drafts in an engine, by draft position."""

    agreement: tuple[float, ...]
    """Share of positions where the drafter's likeliest token is the policy's."""
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

    token_ids_nK: torch.Tensor
    """The policy's likeliest tokens, the likeliest first."""
    logits_nK: torch.Tensor
    log_sum_n: dict[float, torch.Tensor]
    """Per temperature: log of the sum of exp(logit / temperature) over the whole vocabulary."""

    @classmethod
    def of(cls, logits_nV: torch.Tensor, temperatures: Sequence[float]) -> PolicyOutput:
        """Reduce the policy's logits."""
        logits_nK, token_ids_nK = logits_nV.topk(min(LIKELIEST, logits_nV.shape[-1]), -1)
        return cls(
            token_ids_nK,
            logits_nK,
            {t: (logits_nV / t if t != 1 else logits_nV).logsumexp(-1) for t in temperatures if t},
        )

    @classmethod
    def joined(cls, parts: Sequence[PolicyOutput]) -> PolicyOutput:
        """Concatenate the outputs of consecutive positions."""
        return cls(
            torch.cat([part.token_ids_nK for part in parts]),
            torch.cat([part.logits_nK for part in parts]),
            {t: torch.cat([part.log_sum_n[t] for part in parts]) for t in parts[0].log_sum_n},
        )

    def at(self, places: torch.Tensor) -> PolicyOutput:
        """Return the output at some of the positions."""
        return PolicyOutput(
            self.token_ids_nK[places],
            self.logits_nK[places],
            {t: x[places] for t, x in self.log_sum_n.items()},
        )


@dataclass(frozen=True, slots=True)
class HeldOutWindow:
    """A held-out sample, or a window of one, on which drafters are evaluated."""

    row: Row
    policy: PolicyOutput
    """The policy's output where the row's chains are verified."""


class AcceptanceMeter:
    """Sums acceptances over drafts of held-out samples into an `Acceptance`.

    A draft is accepted with the chance that it equals the policy's draw with the same noise. The
    text after the chain's start stands for the accepted tokens: position j counts by the chance
    that drafts 0..j-1 equal the text. The expected length is exact for text sampled at the same
    temperature.
    """

    def __init__(self, num_steps: int, temperatures: Sequence[float]) -> None:
        self._hits = [0.0] * num_steps
        self._counts = [0] * num_steps
        self._accepted = {t: [0.0] * num_steps for t in temperatures}
        self._reached = {t: [0.0] * num_steps for t in temperatures}

    def add(
        self,
        step: int,
        drafted: Drafted,
        policy: PolicyOutput,
        text_n: torch.Tensor,
        reached_n: Mapping[float, torch.Tensor],
    ) -> dict[float, torch.Tensor]:
        """Count the drafts of one position, and return the chances [n] to reach the next one.

        `reached_n` has, by temperature, the chance that all earlier drafts of the chain equal the
        text, whose next token is `text_n`.
        """
        hit_n = policy.token_ids_nK[:, 0] == drafted.best_n
        self._hits[step] += hit_n.sum().item()
        self._counts[step] += len(hit_n)
        following: dict[float, torch.Tensor] = {}
        for temperature, sums in self._accepted.items():
            if temperature > 0:
                accepted_n, follows_n = drafted.chances(policy, text_n, temperature)
            else:
                accepted_n, follows_n = hit_n.float(), (drafted.best_n == text_n).float()
            reached = reached_n[temperature]
            sums[step] += (accepted_n * reached).sum().item()
            self._reached[temperature][step] += reached.sum().item()
            following[temperature] = reached * follows_n
        return following

    def result(self) -> Acceptance:
        """Return the acceptance over everything that was added."""
        counted = zip(self._hits, self._counts, strict=True)
        rates = {
            t: tuple(a / r if r else 0.0 for a, r in zip(sums, self._reached[t], strict=True))
            for t, sums in self._accepted.items()
        }
        return Acceptance(tuple(hits / max(count, 1) for hits, count in counted), rates)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter's output at n positions."""

    logits_nD: torch.Tensor
    """Logits over the draft vocabulary."""
    best_n: torch.Tensor
    """The drafter's likeliest token."""
    draft_id_V: torch.Tensor
    """Draft id of each token; -1 where the drafter lacks it."""

    def chances(
        self, policy: PolicyOutput, text_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chances [n] that the draft is accepted, and that it is the text's token.

        The second one is given that the policy drew that token. It is 0 if the token is not among
        the policy's likeliest.
        """
        log_p_nK = policy.logits_nK / temperature - policy.log_sum_n[temperature][:, None]
        draft_id_nK = self.draft_id_V[policy.token_ids_nK]
        log_q_nD = (self.logits_nD.float() / (temperature * DRAFT_NOISE)).log_softmax(-1)
        log_q_nK = log_q_nD.gather(-1, draft_id_nK.clamp_min(0))
        log_q_nK = log_q_nK.masked_fill(draft_id_nK < 0, float("-inf"))
        joint_nK = joint_log_chances(log_p_nK, log_q_nK)
        is_text_nK = policy.token_ids_nK == text_n[:, None]
        given_nK = (joint_nK - log_p_nK).exp()
        return joint_nK.exp().sum(-1), (given_nK * is_text_nK).sum(-1).clamp(max=1.0)


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
    vocabulary = drafter.draft_token_ids()
    draft_id_V = vocabulary.new_full((drafter.config.vocab_size,), -1)
    draft_id_V[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    for window in windows:
        row = window.row
        starts = row.chains.starts
        with passes.autocast():
            outputs = passes.unroll(row, should_stop)
            reached_C = {t: torch.ones_like(starts, dtype=torch.float) for t in temperatures}
            for step, hidden_CH in enumerate(outputs):
                check_stop(hidden_CH, should_stop)
                learned_C = row.learned(step)
                logits_nD = drafter.lm_head(hidden_CH[learned_C])
                drafted = Drafted(logits_nD, vocabulary[logits_nD.argmax(-1)], draft_id_V)
                target = torch.searchsorted(starts, starts[learned_C] + step)
                following = meter.add(
                    step,
                    drafted,
                    window.policy.at(target),
                    row.token_ids_T[starts[learned_C] + 2 + step],
                    {t: reached[learned_C] for t, reached in reached_C.items()},
                )
                for t, chance_n in following.items():
                    reached_C[t][learned_C] = chance_n
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
