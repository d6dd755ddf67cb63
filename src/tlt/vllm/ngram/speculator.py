"""Drafts from n-grams on vLLM's V2 runner: from all recent samples, or from the request's own text.

A lookup in the `History` of all samples runs on the host. V2 keeps the text of every request in
host memory that the device writes to. The lookup waits until the device has written the tokens of
the engine step, which costs such steps the overlap of asynchronous scheduling and nothing else.
Rows that find nothing repeat their last token, as in vLLM's own n-gram speculator: the device
embeds every draft, so there must be one.

V2 does not tell the host how long a text is once its request has ended. So our scheduler sends the
texts of ended requests (`scheduler`).

Import this module late: vLLM's start-up on CPU walks all loaded modules, and fails on those of
numba.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from tlt.contracts import DrafterName
from tlt.errors import EngineError
from tlt.vllm.ngram.history import History


class NgramDrafts(Protocol):
    """Writes drafts that follow n-grams."""

    def draft(
        self,
        batch: Any,
        num_drafts: int,
        num_sampled_B: torch.Tensor,
        last_sampled: torch.Tensor,
        draft_BK: torch.Tensor,
    ) -> None:
        """Write `num_drafts` drafts for each request of the batch."""

    def requests_ended(self, texts: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Learn the rest of ended requests: the length of each prompt, and the whole text."""

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop ended requests that nothing is learned from."""

    def forget(self) -> None:
        """Forget all samples."""


class HistoryDrafts:
    """Looks up the end of each request in all recent samples."""

    def __init__(self, req_states: Any, ngram: dict[str, int]) -> None:
        if not hasattr(req_states.all_token_ids, "_uva_buf"):
            raise EngineError(
                "engine.ngram.history_tokens > 0 needs pinned host memory, which this machine "
                "does not have; set it to 0"
            )
        self.history = History(ngram["history_tokens"], ngram["min_match"], ngram["max_match"])
        self._states = req_states
        self._forgotten: set[str] = set()
        """Requests that ended before the history was forgotten, and may still arrive here."""
        self.history.draft([], [], [], np.zeros((1, 1), dtype=np.int32), [])  # compiles the kernels

    def draft(
        self,
        batch: Any,
        num_drafts: int,
        num_sampled_B: torch.Tensor,
        last_sampled: torch.Tensor,
        draft_BK: torch.Tensor,
    ) -> None:
        """Learn the tokens of this engine step, and write drafts for all requests of the batch."""
        slots = batch.idx_mapping_np[: batch.num_reqs]
        num_tokens = self._num_tokens(batch)
        token_ids = self._states.all_token_ids._uva_buf.np
        drafts: Any = np.empty((batch.num_reqs, num_drafts), dtype=np.int64)
        drafts[:] = token_ids[slots, num_tokens - 1, np.newaxis]
        found = self.history.draft(
            batch.req_ids,
            self._states.prompt_len.np[slots],
            num_tokens,
            token_ids,
            [num_drafts] * batch.num_reqs,
            slots,
        )
        for row, tokens in enumerate(found):
            drafts[row, : len(tokens)] = tokens
        draft_BK[: batch.num_reqs, :num_drafts] = async_tensor_h2d(drafts, draft_BK.device)

    def _num_tokens(self, batch: Any) -> Any:
        """Return the length of each text. Wait for the device to write the text."""
        num_tokens_B = self._states.total_len.gpu[batch.idx_mapping[: batch.num_reqs]]
        with gpu_sync_allowed():  # the lookup needs the tokens of this engine step
            return num_tokens_B.cpu().numpy()

    def requests_ended(self, texts: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Learn the rest of ended requests: the length of each prompt, and the whole text."""
        for request_id, (num_prompt_tokens, text) in sorted(texts.items()):
            if request_id in self._forgotten:
                self.history.forget(request_id)
            else:
                self.history.end(request_id, num_prompt_tokens, np.array(text, dtype=np.int32))
        self._forgotten -= texts.keys()

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop ended requests that nothing is learned from."""
        for request_id in request_ids:
            self.history.forget(request_id)

    def forget(self) -> None:
        """Forget all samples. Between rollouts, the last requests are still known here."""
        self._forgotten = set(self._states.req_id_to_index)
        self.history.clear()


class OwnTextDrafts:
    """Looks up the end of each request in its own text, with vLLM's kernels on the device."""

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, ngram: dict[str, int]
    ) -> None:
        # vLLM reads the match lengths from the speculative config, which holds them only for the
        # method "ngram_gpu". So its speculator gets a view with the fields that it reads.
        view = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=ngram["min_match"],
                prompt_lookup_max=ngram["max_match"],
                num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            ),
            model_config=vllm_config.model_config,
            scheduler_config=vllm_config.scheduler_config,
        )
        self._speculator = NgramGPUSpeculator(view, device, req_states)

    def draft(
        self,
        batch: Any,
        num_drafts: int,
        num_sampled_B: torch.Tensor,
        last_sampled: torch.Tensor,
        draft_BK: torch.Tensor,
    ) -> None:
        """Write drafts for all requests of the batch."""
        none: Any = None  # vLLM's n-gram speculator reads the text only
        inputs = [none, none, none, none, num_sampled_B, none, last_sampled, none, none, none]
        found_BK = self._speculator.propose(batch, *inputs)
        draft_BK[: batch.num_reqs, :num_drafts] = found_BK[:, :num_drafts]

    def requests_ended(self, texts: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Learn nothing."""

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop nothing."""

    def forget(self) -> None:
        """Forget nothing."""


def ngram_drafts(
    vllm_config: Any, device: torch.device, req_states: Any, ngram: dict[str, int]
) -> NgramDrafts:
    """Return the lookup that these settings ask for."""
    if ngram["history_tokens"]:
        return HistoryDrafts(req_states, ngram)
    return OwnTextDrafts(vllm_config, device, req_states, ngram)


class HistorySpeculator(BaseSpeculator):
    """The speculator of an engine without a draft model."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, ngram: dict[str, int]
    ) -> None:
        speculative = vllm_config.speculative_config
        self.drafter: DrafterName = "ngram"
        # vLLM keeps these texts on the device for its own n-gram speculator.
        req_states.all_token_ids = StagedWriteTensor(
            (req_states.max_num_reqs, req_states.max_model_len),
            dtype=torch.int32,
            device=device,
            uva_instead_of_gpu=True,
        )
        self.history = HistoryDrafts(req_states, ngram)
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

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop nothing: no input is skipped."""

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
            self.history.draft(
                input_batch, num_speculative_tokens, num_sampled, last_sampled, self._draft_BK
            )
        return self._draft_BK[: input_batch.num_reqs]
