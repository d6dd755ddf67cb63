"""The policy as the learner runs it: packed rows in, log-probabilities and hidden states out.

Samples of one group share their prompt's tokens. For short answers to long questions, that saves
most of the work.

`PackedPolicy` wraps a Hugging Face causal LM in one module, so that FSDP has one root whose forward
pass covers body and head. The head runs only for learned tokens: it is a large part of a small
model's work. Shapes: T tokens of a row, E tokens of its samples (a shared prompt counted for each
sample), P learned tokens, A auxiliary states (3H), H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tlt.learner.batch import HEAD_CHUNK_TOKENS, TrainSample
from tlt.learner.packed_attention import segment_ends, use_packed_attention

ENTROPY_TOKENS = 128
"""Tokens whose probabilities are in memory at a time, to compute their entropy."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Prompts and their responses one after another, with the training targets.

    Samples of one prompt share the prompt's tokens. The prompt's states are computed once, and the
    state of its last token predicts the first token of every response.
    """

    samples: tuple[TrainSample, ...]
    ids_T: torch.Tensor
    position_T: torch.Tensor
    lengths: tuple[int, ...]
    """Lengths of the samples as attention sees them: prompt and response."""
    ends: torch.Tensor
    """0 and the end of each sample as attention sees them."""
    unshare_E: torch.Tensor | None
    """Index into the row for every token of every sample, one sample after another; None if no
    sample shares its prompt."""
    share_T: torch.Tensor | None
    """Index into the samples' tokens for every token of the row; the inverse of `unshare_E`."""
    source_P: torch.Tensor
    """Index of the row's token whose state predicts each learned token."""
    target_P: torch.Tensor
    engine_logprob_P: torch.Tensor
    advantage_P: torch.Tensor
    weight_P: torch.Tensor

    @classmethod
    def pack(
        cls,
        samples: Sequence[TrainSample],
        token_weights: Sequence[float],
        device: torch.device,
    ) -> PackedRow:
        """Pack samples into a row; neighbours with the same prompt share it.

        An empty row becomes one token without a training target.
        """
        ids: list[int] = []
        positions: list[int] = []
        unshare: list[int] = []
        source: list[int] = []
        target: list[int] = []
        engine: list[float] = []
        advantages: list[float] = []
        weights: list[float] = []
        prompt: tuple[int, ...] | None = None
        prompt_at = 0
        for sample, weight in zip(samples, token_weights, strict=True):
            drawn = sample.drawn()
            if sample.prompt_ids != prompt:
                prompt, prompt_at = sample.prompt_ids, len(ids)
                ids += prompt
                positions += range(len(prompt))
            last_of_prompt, response_at = prompt_at + len(prompt) - 1, len(ids)
            ids += sample.response_ids
            positions += range(len(prompt), len(sample))
            unshare += range(prompt_at, last_of_prompt + 1)
            unshare += range(response_at, len(ids))
            source += [response_at + place - 1 if place else last_of_prompt for place in drawn]
            target += [sample.response_ids[place] for place in drawn]
            engine += [sample.engine_logprobs[place] for place in drawn]
            advantages += [sample.advantage] * len(drawn)
            weights += [weight] * len(drawn)
        if not ids:
            ids, positions, unshare = [0], [0], [0]
        unshare_E = share_T = None
        if len(unshare) > len(ids):
            unshare_E = torch.tensor(unshare, device=device)
            first_seen: dict[int, int] = {}
            for place, token in enumerate(unshare):
                first_seen.setdefault(token, place)
            share_T = torch.tensor([first_seen[t] for t in range(len(ids))], device=device)
        lengths = tuple(len(s) for s in samples) or (1,)
        return cls(
            samples=tuple(samples),
            ids_T=torch.tensor(ids, device=device),
            position_T=torch.tensor(positions, device=device),
            lengths=lengths,
            ends=segment_ends(lengths, device),
            unshare_E=unshare_E,
            share_T=share_T,
            source_P=torch.tensor(source, dtype=torch.long, device=device),
            target_P=torch.tensor(target, dtype=torch.long, device=device),
            engine_logprob_P=torch.tensor(engine, dtype=torch.float32, device=device),
            advantage_P=torch.tensor(advantages, dtype=torch.float32, device=device),
            weight_P=torch.tensor(weights, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class RowOutput:
    logprob_P: torch.Tensor
    aux_TA: torch.Tensor | None
    """Inputs of the layers that the drafter reads, detached; None without `with_states`."""
    final_TH: torch.Tensor | None
    entropy_sum: float = 0.0
    """Entropy where a token is learned, summed; 0 without `with_entropy`."""


class PackedPolicy(nn.Module):
    """A causal LM that computes log-probabilities of packed rows at a sampling temperature."""

    def __init__(
        self,
        policy: Any,
        temperature: float,
        aux_layer_ids: Sequence[int] = (),
        attention_kernel: bool = False,
    ) -> None:
        super().__init__()
        use_packed_attention(policy, attention_kernel)
        self.policy = policy
        self._temperature = temperature
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._seen: dict[int, torch.Tensor] = {}
        self._looks = False
        """Whether states are wanted: in a forward pass, not when checkpointing repeats it."""
        self._entropy: list[torch.Tensor] | None = None
        """Summed entropies of the head's calls while they are wanted, as `_looks`."""
        for layer_id in self._aux_layer_ids:
            policy.model.layers[layer_id].register_forward_pre_hook(
                lambda module, args, kwargs, layer_id=layer_id: self._see(layer_id, args, kwargs),
                with_kwargs=True,
            )

    def forward(
        self, row: PackedRow, with_states: bool = False, with_entropy: bool = False
    ) -> RowOutput:
        self._seen.clear()
        self._looks = with_states
        hidden_TH = self.policy.model(
            row.ids_T[None],
            position_ids=row.position_T[None],
            segment_lengths=list(row.lengths),
            segment_ends=row.ends,
            unshare=row.unshare_E,
            share=row.share_T,
            use_cache=False,
        ).last_hidden_state[0]
        self._looks = False
        states = (None, None)
        if with_states:
            aux = [self._seen[layer_id] for layer_id in self._aux_layer_ids]
            states = (torch.cat(aux, -1).to(torch.bfloat16), hidden_TH.detach().to(torch.bfloat16))
        self._seen.clear()
        self._entropy = [] if with_entropy else None
        logprob_P = self._logprobs(hidden_TH[row.source_P], row.target_P)
        entropies, self._entropy = self._entropy, None
        if not len(row.source_P):
            # This rank learns nothing, but it must still take part in the gradient's collectives.
            logprob_P = self._head_logprobs(hidden_TH[:1], row.ids_T[:1])[:0] + 0 * hidden_TH.sum()
        return RowOutput(logprob_P, *states, sum(each.item() for each in entropies or ()))

    def _see(self, layer_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._looks:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._seen[layer_id] = hidden[0].detach()

    def _logprobs(self, hidden_PH: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
        if len(target_P) <= HEAD_CHUNK_TOKENS:
            return self._head_logprobs(hidden_PH, target_P)
        parts = [
            checkpoint(self._head_logprobs, hidden, target, use_reentrant=False)
            for hidden, target in zip(
                hidden_PH.split(HEAD_CHUNK_TOKENS), target_P.split(HEAD_CHUNK_TOKENS), strict=True
            )
        ]
        return torch.cat(parts)

    def _head_logprobs(self, hidden_PH: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
        logits_PV = self.policy.get_output_embeddings()(hidden_PH).float()
        if self._temperature != 1.0:
            logits_PV = logits_PV / self._temperature
        if self._entropy is not None:
            self._entropy.append(_entropy_sum(logits_PV.detach()))
        return -F.cross_entropy(logits_PV, target_P, reduction="none")


def _entropy_sum(logits_PV: torch.Tensor) -> torch.Tensor:
    """Return the summed entropy, a few tokens at a time: logits are large, and so are copies."""
    total = logits_PV.new_zeros(())
    for part_PV in logits_PV.split(ENTROPY_TOKENS):
        logprob_PV = part_PV.log_softmax(-1)
        total -= (logprob_PV.exp() * logprob_PV).sum()
    return total
