"""A proposer that drafts with EAGLE-3 or with n-grams, switchable from step to step.

vLLM builds one proposer per engine. This one is its EAGLE proposer; when the step's arm is
n-gram it still lets the draft model see the step's tokens (one pass, as vLLM does for a draft
length of 0), so that the drafter's KV cache has no holes and EAGLE-3 can take over at any step
without a re-prefill; the drafts then come from vLLM's own n-gram lookup.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.spec_decode.eagle import EagleProposer

from tlt.contracts import DrafterName


class SwitchingProposer(EagleProposer):
    """EAGLE-3 and n-grams in one engine. `drafter` names who drafts in the current step."""

    def __init__(
        self, vllm_config: Any, device: torch.device, runner: Any, ngram: dict[str, int] | None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.drafter: DrafterName = "eagle3"
        self._ngram = ngram_lookup(vllm_config, ngram) if ngram else None
        self._sampled_token_ids: torch.Tensor | None = None
        self._discarded: torch.Tensor | None = None
        self._input_batch: Any = None

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> Any:
        # vLLM calls this right before `propose`; the n-gram lookup needs what it is given.
        self._sampled_token_ids = sampled_token_ids
        self._input_batch = gpu_input_batch
        self._discarded = discard_request_mask
        return super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if self.drafter != "ngram" or num_speculative_tokens == 0:
            return super().propose(num_speculative_tokens, *args, **kwargs)
        super().propose(0, *args, **kwargs)
        return self._propose_ngrams(num_speculative_tokens)

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM spreads the draft logits over the whole vocabulary first; the winner is the same."""
        model = self.model
        best = model.logits_processor(model.lm_head, hidden_states).argmax(dim=-1)
        offsets = model.draft_id_to_target_id
        return best if offsets is None else best + offsets[best]

    def _propose_ngrams(self, num_speculative_tokens: int) -> list[list[int]]:
        assert self._ngram is not None, "the policy drafts n-grams the engine was not set up for"
        assert self._sampled_token_ids is not None
        assert self._discarded is not None
        batch = self._input_batch
        num_requests = batch.num_reqs
        discarded = self._discarded[:num_requests].tolist()
        sampled = [
            [] if discard else [token for token in row if 0 <= token < batch.vocab_size]
            for row, discard in zip(self._sampled_token_ids.tolist(), discarded, strict=False)
        ]
        # The runner appends this step's tokens only after drafting. Writing them now, to the very
        # places where it will write them, gives the lookup the whole text without a copy.
        num_tokens = batch.num_tokens_no_spec[:num_requests].copy()
        for row, tokens in enumerate(sampled):
            start = num_tokens[row]
            end = min(start + len(tokens), batch.token_ids_cpu.shape[1])
            batch.token_ids_cpu[row, start:end] = tokens[: end - start]
            num_tokens[row] = end
        return self._ngram.propose(num_speculative_tokens, sampled, num_tokens, batch.token_ids_cpu)


def ngram_lookup(vllm_config: Any, ngram: dict[str, int]) -> Any:
    """vLLM's n-gram proposer, inside an engine whose configured method is another one.

    It reads its match lengths from the speculative config, where they are only kept for the
    method "ngram"; hence this view with just the fields it reads. Imported late: vLLM's start-up on
    CPU walks all loaded modules and trips over those of numba, which this one brings.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    view = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=ngram["min_match"],
            prompt_lookup_max=ngram["max_match"],
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        ),
        model_config=vllm_config.model_config,
        scheduler_config=vllm_config.scheduler_config,
        parallel_config=vllm_config.parallel_config,
    )
    return NgramProposer(view)
