"""Fast rejection sampling for CPU engines.

vLLM's sampler is written for GPUs, which read the logits many times at little cost. On a CPU core
each pass over [rows, vocabulary] takes milliseconds, and vLLM makes about ten: copies of the
logits, probabilities of every row, exponential noise for every request twice, recovered tokens for
every draft, log-probabilities of every row. Only one pass is needed (the normalizer of each row),
plus one row per request to sample from. The rule is vLLM's own, for drafts without probabilities:

    accept draft d with probability p(d); at the first rejection sample from p without d;
    after the last acceptance sample from p

vLLM's sampler handles all other cases (top-k, top-p, penalties, seeds, draft probabilities, ...).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler


class LeanRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with a fast path.

    Shapes: R rows of logits (each request's drafts and one more), N drafts, B requests.
    """

    def forward(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling: Any
    ) -> SamplerOutput:
        if draft_probs is not None or not self._is_plain(sampling):
            return super().forward(metadata, draft_probs, logits, sampling)
        raw_RV = logits.float()
        num_rows_B = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
        scaled_RV = raw_RV
        if not sampling.all_greedy and not bool((sampling.temperature == 1).all()):
            scaled_RV = raw_RV / sampling.temperature.repeat_interleave(num_rows_B)[:, None]
        norm_R = None if sampling.all_greedy else scaled_RV.logsumexp(-1)
        accepted_N = self._accept(metadata, scaled_RV, norm_R)
        output_BK, row_BK = self._emit(metadata, scaled_RV, norm_R, accepted_N, num_rows_B)
        logprobs = None
        if sampling.max_num_logprobs is not None:
            if norm_R is None or scaled_RV is not raw_RV:
                norm_R = raw_RV.logsumexp(-1)
            logprobs = _logprobs(raw_RV, norm_R, output_BK, row_BK)
        return SamplerOutput(sampled_token_ids=output_BK, logprobs_tensors=logprobs)

    def _is_plain(self, sampling: Any) -> bool:
        holder = sampling.thinking_budget_state_holder
        return (
            (sampling.all_random or sampling.all_greedy)
            and sampling.top_k is None
            and sampling.top_p is None
            and sampling.no_penalties
            and not sampling.generators
            and not sampling.bad_words_token_ids
            and not sampling.logprob_token_ids
            and sampling.allowed_token_ids_mask is None
            and sampling.max_num_logprobs in (None, 0)
            and self.sampler.logprobs_mode == "raw_logprobs"
            and not self.synthetic_mode
            and (holder is None or not holder.has_tracked_requests())
            and all(_is_idle(processor) for processor in sampling.logitsprocs.all)
        )

    def _accept(
        self, metadata: Any, scaled_RV: torch.Tensor, norm_R: torch.Tensor | None
    ) -> torch.Tensor:
        rows_N = metadata.target_logits_indices.long()
        drafts_N = metadata.draft_token_ids.long()
        if norm_R is None:
            return scaled_RV[rows_N].argmax(-1) == drafts_N
        chance_N = (scaled_RV[rows_N, drafts_N] - norm_R[rows_N]).double().exp()
        # In float64, because a float32 uniform is exactly 0 too often.
        uniform_N = torch.rand(len(rows_N), dtype=torch.float64, device=rows_N.device)
        return (uniform_N < chance_N) & (drafts_N >= 0)  # vLLM marks "no draft" by -1

    def _emit(
        self,
        metadata: Any,
        scaled_RV: torch.Tensor,
        norm_R: torch.Tensor | None,
        accepted_N: torch.Tensor,
        num_rows_B: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of each request, and the row of each token [B, K+1]."""
        device = scaled_RV.device
        batch = len(num_rows_B)
        first_B = num_rows_B.cumsum(0) - num_rows_B
        request_N = torch.arange(batch, device=device).repeat_interleave(num_rows_B - 1)
        place_N = metadata.target_logits_indices.long() - first_B[request_N]
        good_BK = torch.zeros(batch, metadata.max_spec_len + 1, dtype=torch.long, device=device)
        good_BK[request_N, place_N] = accepted_N.long()
        count_B = good_BK.cumprod(1).sum(1)
        last_B = first_B + count_B
        rejected_B = count_B < num_rows_B - 1

        final_BV = scaled_RV[last_B]
        if norm_R is None:
            token_B = final_BV.argmax(-1)
        else:
            draft_R = torch.zeros(len(scaled_RV), dtype=torch.long, device=device)
            draft_R[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()
            where = (rejected_B & (draft_R[last_B] >= 0)).nonzero()[:, 0]
            final_BV[where, draft_R[last_B[where]]] = float("-inf")
            token_B = _sample(final_BV)

        offset_K = torch.arange(good_BK.shape[1], device=device)
        output_BK = torch.full_like(good_BK, PLACEHOLDER_TOKEN_ID)
        output_BK[request_N, place_N] = metadata.draft_token_ids.long()
        output_BK[offset_K >= count_B[:, None]] = PLACEHOLDER_TOKEN_ID
        output_BK[torch.arange(batch, device=device), count_B] = token_B
        row_BK = (first_B[:, None] + offset_K).clamp(max=len(scaled_RV) - 1)
        return output_BK.to(torch.int32), row_BK


def _sample(logits_BV: torch.Tensor) -> torch.Tensor:
    """Sample one token per row, by inverting the cumulative distribution.

    The sums are in float64, so that rounding does not change the distribution.
    """
    cumulated_BV = logits_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    total_B = cumulated_BV[:, -1:]
    point_B = torch.rand(len(logits_BV), 1, dtype=torch.float64, device=logits_BV.device) * total_B
    return torch.searchsorted(cumulated_BV, point_B, right=True)[:, 0]


def _logprobs(
    raw_RV: torch.Tensor, norm_R: torch.Tensor, output_BK: torch.Tensor, row_BK: torch.Tensor
) -> LogprobsTensors:
    """Return log-probability and rank of each emitted token, in the layout of vLLM's sampler."""
    rows = row_BK.flatten()
    tokens = output_BK.flatten().long().clamp(min=0)
    chosen = raw_RV[rows, tokens]
    emitted = (output_BK.flatten() != PLACEHOLDER_TOKEN_ID).nonzero()[:, 0]
    ranks = torch.zeros_like(tokens)
    ranks[emitted] = (raw_RV[rows[emitted]] >= chosen[emitted, None]).sum(-1)
    return LogprobsTensors(tokens[:, None].to(torch.int32), (chosen - norm_R[rows])[:, None], ranks)


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinPLogitsProcessor):
        return processor.min_p_count == 0
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return isinstance(processor, MinTokensLogitsProcessor) and not processor.min_toks
