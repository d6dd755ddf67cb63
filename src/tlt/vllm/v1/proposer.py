"""Proposers whose drafter can change from one engine step to the next.

vLLM builds one proposer per engine. `SwitchingProposer` is its EAGLE proposer; when the arm of an
engine step has another drafter, the drafts come from a `Lookup` (`tlt.vllm.runner`). In engines
with the keyed sampler, EAGLE-3's drafts are drawn with the noise of their request
(`drafter.agreement.DRAFT_NOISE`).

EAGLE-3 can take over at any engine step without a new prefill, because its KV cache is complete by
then. Stock vLLM runs the draft model in every engine step for that, even if it drafts nothing. Here
engine steps that only decode skip the draft model. The proposer keeps the skipped inputs, and fills
the KV cache from them when EAGLE-3 drafts again (`catch_up`). Engine steps with prompt tokens
always run the draft model, because requests share the blocks of prompts through the prefix cache.
The blocks of a response are shared only with a later prompt that repeats it. For such a prompt the
skipped entries are missing, which may cost acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from tlt.contracts import DrafterName
from tlt.drafter.agreement import DRAFT_NOISE
from tlt.vllm import compat, keyed
from tlt.vllm.catch_up import Missed, MissedInputs
from tlt.vllm.runner import Lookup
from tlt.vllm.v1 import sampler


class SwitchingProposer(EagleProposer):
    """EAGLE-3 and lookups in one engine. `drafter` drafts in the current engine step."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        runner: Any,
        lookups: Mapping[str, Lookup],
        state_budget_bytes: int = 0,
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self.drafter: DrafterName = "eagle3"
        self._num_blocks = -(-vllm_config.model_config.get_vocab_size() // keyed.BLOCK)
        self._key_B: Any = None
        self._position_B: Any = None
        """Place of the next draft token in each response."""
        self._inverse_B: Any = None
        self.missed = MissedInputs(state_budget_bytes)
        self.lookups = lookups
        # Inputs of the current engine step.
        self.sampled_token_ids: torch.Tensor | None = None
        self.num_sampled: torch.Tensor | None = None
        self.discarded: torch.Tensor | None = None
        self.input_batch: Any = None

    # --- loading --------------------------------------------------------------------------------

    def _maybe_share_embeddings(self, target_language_model: Any) -> None:
        with self._keeping(self.model.model, "embed_tokens"):
            super()._maybe_share_embeddings(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: Any) -> None:
        with self._keeping(self.model, "lm_head"):
            super()._maybe_share_lm_head(target_language_model)

    @contextmanager
    def _keeping(self, owner: torch.nn.Module, name: str) -> Iterator[None]:
        """Keep the drafter's own module even if vLLM replaces it meanwhile (`compat`)."""
        own = getattr(owner, name)
        yield
        if not compat.skips("sharing"):
            setattr(owner, name, own)

    # --- calls of the runner in every engine step -----------------------------------------------

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> Any:
        # vLLM calls this right before `propose`; n-grams and noise need these inputs.
        self.sampled_token_ids = sampled_token_ids
        self.input_batch = gpu_input_batch
        self.discarded = discard_request_mask
        next_token_ids, self.num_sampled = super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )
        return next_token_ids, self.num_sampled

    def propose(self, num_speculative_tokens: int, **inputs: Any) -> Any:
        if self.drafter == "eagle3" and num_speculative_tokens > 0:
            self._catch_up(inputs)
            self._begin_drafts(inputs["sampling_metadata"])
            return super().propose(num_speculative_tokens, **inputs)
        if not self._skip(inputs):
            super().propose(0, **inputs)
        if num_speculative_tokens > 0:
            return self._look_up(num_speculative_tokens)
        return torch.empty(self.input_batch.num_reqs, 0, dtype=torch.int64, device=self.device)

    # --- skipping the draft model, and catch-up -------------------------------------------------

    @property
    def _can_skip(self) -> bool:
        """Whether the keys and values of a position depend only on the inputs at that position."""
        return (
            self.missed.budget_bytes > 0
            and len(self._draft_attn_layer_names) == 1
            and not self.supports_mm_inputs
            and self.vllm_config.parallel_config.decode_context_parallel_size == 1
        )

    def _skip(self, inputs: dict[str, Any]) -> bool:
        """Keep the draft model's inputs of this engine step; return False if the model must run."""
        batch = self.input_batch
        if not self._can_skip or not _only_decodes(batch):
            return False
        num_rejected = inputs["num_rejected_tokens_gpu"]
        if num_rejected is not None and self.vllm_config.scheduler_config.async_scheduling:
            return False  # only the device knows the number yet, and waiting for it costs more
        metadata = inputs["common_attn_metadata"]
        starts = metadata.query_start_loc_cpu.numpy()
        num_rows = np.diff(starts)
        last_B = inputs["token_indices_to_sample"]
        if last_B is None:
            last_B = metadata.query_start_loc[1:] - 1
        if num_rejected is not None:
            num_rows -= num_rejected.cpu().numpy()
        token_T = inputs["target_token_ids"].roll(-1)
        token_T[last_B] = inputs["next_token_ids"]
        rows = [np.arange(s, s + n) for s, n in zip(starts[:-1], num_rows, strict=True)]
        row_T = torch.from_numpy(np.concatenate(rows)).to(self.device, non_blocking=True)
        # Indexing copies, as it must: vLLM reuses these tensors in the next engine step.
        kept = (
            inputs["target_positions"][row_T],
            token_T[row_T],
            inputs["target_hidden_states"][row_T],
        )
        if self.missed.add(batch.req_ids, num_rows, *kept):
            return True
        self._catch_up(inputs)
        return self.missed.add(batch.req_ids, num_rows, *kept)

    def _catch_up(self, inputs: dict[str, Any]) -> None:
        """Write the missing keys and values of the requests of this engine step."""
        metadata = inputs["common_attn_metadata"]
        first_B = inputs["target_positions"][metadata.query_start_loc[:-1]]
        for missed in self.missed.take(self.input_batch.req_ids, self.max_num_tokens):
            self.write_missed(missed, first_B, inputs)

    def write_missed(self, missed: Missed, first_B: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Run the draft model once, only for its keys and values.

        Each row's position decides where they go; the result of the attention does not matter. So
        every request poses as a sequence of only its missed rows. The sequence fits into the
        request's row of the block table, because no position is missed twice.

        A preempted request computes its last positions again, from `first_B` on. This engine step
        or a later one writes those; they may not even have a block yet.
        """
        block_table = inputs["common_attn_metadata"].block_table_tensor
        request_T = torch.from_numpy(missed.owner_T).to(self.device, non_blocking=True)
        block_T = block_table[request_T, missed.position_T // self.block_size].long()
        slot_T = block_T * self.block_size + missed.position_T % self.block_size
        slot_T.masked_fill_(missed.position_T >= first_B[request_T], PADDING_SLOT_ID)

        requests, num_rows = np.unique(missed.owner_T, return_counts=True)
        starts = torch.from_numpy(np.concatenate([[0], num_rows.cumsum()]).astype(np.int32))
        lengths = torch.from_numpy(num_rows.astype(np.int32))
        longest = int(num_rows.max())
        super().propose(
            num_speculative_tokens=0,
            # vLLM shifts the tokens by one, and puts the next tokens at `token_indices_to_sample`.
            target_token_ids=missed.token_T.roll(1),
            next_token_ids=missed.token_T[-1:],
            token_indices_to_sample=starts[-1:].to(self.device, non_blocking=True) - 1,
            target_positions=missed.position_T,
            target_hidden_states=missed.state_TA,
            sampling_metadata=inputs["sampling_metadata"],
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=starts.to(self.device, non_blocking=True),
                query_start_loc_cpu=starts,
                seq_lens=lengths.to(self.device, non_blocking=True),
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=len(requests),
                num_actual_tokens=len(missed),
                max_query_len=longest,
                max_seq_len=longest,
                block_table_tensor=block_table[torch.from_numpy(requests).to(self.device)],
                slot_mapping=slot_T,
            ),
        )

    # --- drafting -------------------------------------------------------------------------------

    @property
    def _keys(self) -> sampler.Keys | None:
        """The seeds and positions of the requests; None if the engine does not sample by keys."""
        own = self._runner.sampler
        return own.keys if isinstance(own, sampler.KeyedSampler) else None

    def _begin_drafts(self, sampling: Any) -> None:
        """Fix the noise of the drafts that follow the tokens drawn in this engine step."""
        if self._keys is None or sampling.all_greedy:
            return
        assert self.num_sampled is not None
        num_requests = self.input_batch.num_reqs
        self._key_B, position_B = self._keys.of_batch(num_requests)
        self._position_B = position_B + self.num_sampled.numpy()[:num_requests]
        inverse_B = sampler.inverse_temperature(sampling, num_requests, _has_top(sampling))
        self._inverse_B = inverse_B / np.float32(DRAFT_NOISE)

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, None]:
        """Draw within the draft vocabulary, without vLLM's scatter to the whole one."""
        model = self.model
        logits_BD = model.logits_processor(model.lm_head, hidden_states)
        offset_D = model.draft_id_to_target_id
        if self._keys is None or sampling_metadata.all_greedy:
            best_B = logits_BD.argmax(dim=-1)
            return (best_B if offset_D is None else best_B + offset_D[best_B]), None
        logits_BD = logits_BD.float()
        if _has_top(sampling_metadata):
            scaled_BD = sampler.constrain(logits_BD, sampling_metadata, None)
            logits_BD = sampler.keep_top(scaled_BD, sampling_metadata, None)
        token_D = np.arange(logits_BD.shape[1])
        if offset_D is not None:
            token_D += offset_D.numpy()
        token_B = keyed.draw_drafts(
            logits_BD.contiguous().numpy(),
            token_D,
            self._key_B,
            self._position_B,
            self._inverse_B,
            self._num_blocks,
        )
        self._position_B = self._position_B + 1
        return torch.from_numpy(token_B), None

    def _look_up(self, num_speculative_tokens: int) -> list[list[int]]:
        lookup = self.lookups[self.drafter]
        sampled, num_tokens = self._write_sampled()
        token_ids = self.input_batch.token_ids_cpu
        return lookup.propose(num_speculative_tokens, sampled, num_tokens, token_ids)

    def _write_sampled(self) -> tuple[list[list[int]], Any]:
        """Write the tokens of this engine step to the batch; return them, and the texts' lengths.

        The runner appends these tokens only after drafting. Writing them now, to the same places,
        gives the lookup the whole text without a copy.
        """
        assert self.sampled_token_ids is not None
        assert self.discarded is not None
        batch = self.input_batch
        num_requests = batch.num_reqs
        discarded = self.discarded[:num_requests].tolist()
        sampled = [
            [] if discard else [token for token in row if 0 <= token < batch.vocab_size]
            for row, discard in zip(self.sampled_token_ids.tolist(), discarded, strict=False)
        ]
        num_tokens = batch.num_tokens_no_spec[:num_requests].copy()
        for row, tokens in enumerate(sampled):
            start = num_tokens[row]
            end = min(start + len(tokens), batch.token_ids_cpu.shape[1])
            batch.token_ids_cpu[row, start:end] = tokens[: end - start]
            num_tokens[row] = end
        return sampled, num_tokens


def _has_top(sampling: Any) -> bool:
    return sampling.top_k is not None or sampling.top_p is not None


def _only_decodes(batch: Any) -> bool:
    """Return whether no request reads its prompt or, after a preemption, its response."""
    num_computed = batch.num_computed_tokens_cpu[: batch.num_reqs]
    reads_prompt = num_computed < batch.num_prompt_tokens[: batch.num_reqs]
    reads_again = num_computed + 1 < batch.num_tokens_no_spec[: batch.num_reqs]
    return not (reads_prompt | reads_again).any()


class LookupProposer(NgramProposer):
    """The proposer of an engine without a draft model; vLLM wants one of this type."""

    def __init__(self, lookups: Mapping[str, Lookup]) -> None:
        # Without vLLM's own __init__, which would compile the lookup that we replace.
        self.lookups = lookups
        self.drafter: DrafterName = next(iter(lookups))

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for the rows in which a token was sampled. vLLM calls this."""
        if num_speculative_tokens == 0:
            return [[] for _ in sampled_token_ids]  # the next call that drafts learns the tokens
        lookup = self.lookups[self.drafter]
        return lookup.propose(
            num_speculative_tokens, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
        )
