"""Speculators of vLLM's V2 runner whose drafter can change from one engine step to the next.

vLLM builds one speculator per engine. `SwitchingSpeculator` is its EAGLE speculator, and a subclass
because vLLM's runner checks the type. `drafter` names the drafter of the current engine step; vLLM
passes the number of drafts. The drafts stay on the device: vLLM's scheduler knows only their
number.

As on V1 (`proposer`), engine steps that only decode skip the draft model unless EAGLE-3 drafts. The
speculator keeps the skipped inputs and fills the draft model's KV cache from them before the next
EAGLE-3 draft (`catch_up`). V2 never tells the host which drafts were rejected, so the rows of
rejected drafts are kept too, with position -1, and write nothing. Host arrays reach the device
through pinned memory (`async_tensor_h2d`). So nothing here waits for the device. Engine steps with
prompt tokens always run the draft model; V2 hands a resumed request over as a new one, which reads
its text again as far as the prefix cache does not have it.

Shapes: T rows (tokens of an engine step), B requests of the batch, A the width of the policy's
states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
)
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from tlt.contracts import DrafterName
from tlt.drafter.agreement import DRAFT_NOISE
from tlt.vllm import compat
from tlt.vllm.catch_up import Missed, MissedInputs, sequences
from tlt.vllm.runner import Lookup


class SwitchingSpeculator(EagleSpeculator):
    """EAGLE-3 and lookups in one engine. `drafter` drafts in the current engine step."""

    shares_noise = False
    """Whether drafts are drawn with the noise of the policy's draws. `v2.sampler.install` sets it
    before graphs are recorded, once it has installed acceptance by equality."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        lookups: Mapping[str, Lookup],
        state_budget_bytes: int,
    ) -> None:
        super().__init__(vllm_config, device)
        self.drafter: DrafterName = "eagle3"  # vLLM's warm-up names none
        self.lookups = lookups
        self.num_drafts: int | None = None
        """Drafts of the current engine step where vLLM does not pass their number."""
        self.missed = MissedInputs(state_budget_bytes)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        # Separate builders: catch-up must change no buffer that a CUDA graph reads.
        self._catch_up_groups, _, _ = init_attn_backend(
            self.kv_cache_config,
            self.attn_vllm_config,
            self.device,
            active_layer_names=self.draft_attn_layer_names,
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        def run(num_drafts: int | None) -> torch.Tensor:
            return super(SwitchingSpeculator, self).propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                *args,
                **compat.draft_count(num_drafts),
                **kwargs,
            )

        if not compat.counts_drafts():
            num_speculative_tokens = self.num_drafts
        if num_speculative_tokens is None or kwargs.get("dummy_run"):
            return run(num_speculative_tokens)  # vLLM's profiling, capture or warm-up
        if self.drafter == "eagle3" and num_speculative_tokens > 0:
            self.catch_up(input_batch)
            return run(num_speculative_tokens)
        if not self._skip(input_batch, aux_hidden_states, num_rejected, last_sampled):
            run(0)
        if num_speculative_tokens > 0:
            self.lookups[self.drafter].draft(
                input_batch, num_speculative_tokens, num_sampled, last_sampled, self.draft_tokens
            )
            draft_BK = self.draft_tokens[: input_batch.num_reqs, :num_speculative_tokens]
            self._write_logits(input_batch.idx_mapping, draft_BK)
        return self.draft_tokens[: input_batch.num_reqs]

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draw the draft token of each request for a place; CUDA graphs record this.

        vLLM keys the noise of a draft by the position of the token before it, as it keys the draw
        of the policy at that place, and adds a constant so that both have different noise. Its
        ratio test needs that, and acceptance by equality does not. Top-p and top-k are not applied
        to the drafter's logits, unlike on CPU: fewer of these drafts are accepted there.
        """
        if not self.shares_noise:
            return super().sample_draft(
                hidden_states,
                sample_src_positions,
                idx_mapping,
                temperature,
                seeds,
                draft_step,
                draft_logits,
                *args,
                **kwargs,
            )
        return draw_drafts(
            self.model.compute_logits(hidden_states),
            sample_src_positions,
            idx_mapping,
            temperature,
            seeds,
            self.use_fp64_gumbel,
        )

    def _write_logits(self, slot_B: torch.Tensor, draft_BK: torch.Tensor) -> None:
        """Write one-hot logits for the drafts of a lookup, where vLLM keeps the draft model's
        logits."""
        if self.draft_logits is None:
            return
        logits_BKV = self.draft_logits.new_full((*draft_BK.shape, self.vocab_size), -torch.inf)
        logits_BKV.scatter_(-1, draft_BK.unsqueeze(-1), 0.0)
        self.draft_logits[slot_B, : draft_BK.shape[1]] = logits_BKV

    # --- skipping the draft model, and catch-up -------------------------------------------------

    @property
    def _can_skip(self) -> bool:
        """Whether the keys and values of a position depend only on the inputs at that position."""
        return (
            self.missed.budget_bytes > 0
            and len(self.draft_attn_layer_names) == 1
            and not self.supports_mm_inputs
            and self._reads_everything
            and self.pcp_manager is None
            and self.dp_size == self.dcp_size == 1
        )

    @property
    def _reads_everything(self) -> bool:
        """Whether the draft layer has no window, before which blocks may be another request's."""
        (name,) = self.draft_attn_layer_names
        (group,) = [g for g in self.kv_cache_config.kv_cache_groups if name in g.layer_names]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {name: group.kv_cache_spec})
        return isinstance(specs[name], FullAttentionSpec)

    def _skip(
        self,
        batch: Any,
        aux_hidden_states: list[torch.Tensor] | None,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> bool:
        """Keep the draft model's inputs of this engine step; return False if the model must run."""
        if batch.has_prefill or not aux_hidden_states or not self._can_skip:
            return False
        num_rows = batch.num_scheduled_tokens
        num_tokens = batch.num_tokens
        owners: Any = np.repeat(np.arange(batch.num_reqs), num_rows)
        owner_T = async_tensor_h2d(owners, self.device)
        last_B = batch.query_start_loc[1 : batch.num_reqs + 1] - 1 - num_rejected
        token_T = batch.input_ids[:num_tokens].roll(-1)
        token_T[last_B.long()] = last_sampled[batch.idx_mapping, 0].to(token_T.dtype)
        row_T = torch.arange(num_tokens, device=self.device)
        # All of these must be copies: vLLM reuses its tensors in the next engine step.
        position_T = batch.positions[:num_tokens].where(row_T <= last_B[owner_T], -1)
        state_TA = torch.cat([state[:num_tokens] for state in aux_hidden_states], -1)
        kept = position_T, token_T, state_TA
        if self.missed.add(batch.req_ids, num_rows, *kept):
            return True
        self.catch_up(batch)
        return self.missed.add(batch.req_ids, num_rows, *kept)

    def catch_up(self, batch: Any) -> None:
        """Write the missing keys and values of the requests of this engine step."""
        first_B = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
        for missed in self.missed.take(batch.req_ids, self.max_num_tokens):
            for part in sequences(missed, self._block_size, self.max_num_reqs):
                self._write(first_B, *part)

    @property
    def _group(self) -> int:
        """KV cache group of the draft model's one layer."""
        groups = self.kv_cache_config.kv_cache_groups
        return next(
            index
            for index, group in enumerate(groups)
            if self.draft_attn_layer_names & set(group.layer_names)
        )

    @property
    def _block_size(self) -> int:
        return int(self.block_tables.block_sizes[self._group])

    def _write(self, first_B: torch.Tensor, missed: Missed, request_S: Any, start_S: Any) -> None:
        """Run the draft model once, only for its keys and values.

        Each row's position decides where they go; the result of the attention does not matter. So
        rows pose as S sequences, each within the first block of the request that it names.

        A resumed request computes its last positions again, from `first_B` on. This engine step or
        a later one writes those; they may not even have a block yet.
        """
        num_rows = len(missed)
        block_size = self._block_size
        tables = self.block_tables.input_block_tables  # gathered for this batch
        owner_T = async_tensor_h2d(missed.owner_T, self.device)
        request_index_S = async_tensor_h2d(request_S, self.device)
        position_T = missed.position_T.clamp(min=0)
        block_T = tables[self._group][owner_T, position_T // block_size].long()
        slot_T = block_T * block_size + position_T % block_size
        is_written_T = (missed.position_T >= 0) & (missed.position_T < first_B[owner_T])
        slot_T.masked_fill_(~is_written_T, PAD_SLOT_ID)
        slot_GT = slot_T.expand(len(tables), num_rows).contiguous()
        starts = torch.from_numpy(start_S.astype(np.int32))
        lengths = starts.diff()
        longest = int(np.diff(start_S).max())
        metadata = build_attn_metadata(
            attn_groups=self._catch_up_groups,
            num_reqs=len(request_S),
            num_tokens=num_rows,
            query_start_loc_gpu=async_tensor_h2d(starts, self.device),
            query_start_loc_cpu=starts,
            max_query_len=longest,
            seq_lens=async_tensor_h2d(lengths, self.device),
            max_seq_len=longest,
            block_tables=[table[request_index_S] for table in tables],
            slot_mappings=slot_GT,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=position_T,
            is_prefilling=torch.zeros(len(request_S), dtype=torch.bool),
        )
        self.input_buffers.input_ids[:num_rows] = missed.token_T
        self.input_buffers.positions[:num_rows] = position_T
        self.hidden_states[:num_rows] = self.model.combine_hidden_states(missed.state_TA)
        slots = build_slot_mappings_by_layer(slot_GT, self.kv_cache_config)
        self._run_model(num_rows, metadata, slots, None, CUDAGraphMode.NONE)


class LookupSpeculator(BaseSpeculator):
    """The speculator of an engine without a draft model."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: Any,
        lookups: Mapping[str, Lookup],
    ) -> None:
        speculative = vllm_config.speculative_config
        self.drafter: DrafterName = next(iter(lookups))  # vLLM's warm-up names none
        self.lookups = lookups
        self._draft_BK = torch.zeros(
            req_states.max_num_reqs,
            speculative.num_speculative_tokens,
            dtype=torch.int64,
            device=device,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Capture nothing: there is no draft model."""

    def capture(self) -> None:
        """Capture nothing: there is no draft model."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if num_speculative_tokens and not dummy_run:
            self.lookups[self.drafter].draft(
                input_batch, num_speculative_tokens, num_sampled, last_sampled, self._draft_BK
            )
        return self._draft_BK[: input_batch.num_reqs]


def draw_drafts(
    logits_BV: torch.Tensor,
    key_B: torch.Tensor,
    slot_B: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    use_fp64: bool,
) -> torch.Tensor:
    """Return a draft token per request [B], drawn with a share of the noise of the policy's draw.

    `key_B` has the positions that key the noise; S are the slots of requests.
    """
    return gumbel_sample(
        logits_BV,
        slot_B,
        temperature_S * DRAFT_NOISE,
        seed_S,
        key_B,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=use_fp64,
    )
