"""Lookups on vLLM's V2 runner: in all recent samples, or in the request's own text.

A lookup in the history of all samples runs on the host. V2 keeps the text of every request in host
memory that the device writes to. The lookup waits until the device has written the tokens of the
engine step, which costs such steps the overlap of asynchronous scheduling and nothing else. Engine
steps of other arms do no work for lookups, but for the texts of samples that end: the history
learns what it missed of running samples in the next lookup. Rows that find nothing repeat their
last token, as in vLLM's own n-gram speculator: the device embeds every draft, so there must be one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from tlt.errors import EngineError
from tlt.vllm import compat
from tlt.vllm.ngram.history import HistoryLookup
from tlt.vllm.runner import Lookup


class HistoryV2(HistoryLookup):
    """Drafts from all recent samples."""

    def __init__(self, device: torch.device, req_states: Any, ngram: dict[str, int]) -> None:
        if not hasattr(req_states.all_token_ids, "_uva_buf"):
            # vLLM keeps the texts on the device for its own n-gram speculator.
            req_states.all_token_ids = StagedWriteTensor(
                (req_states.max_num_reqs, req_states.max_model_len),
                dtype=torch.int32,
                device=device,
                uva_instead_of_gpu=True,
            )
        if not hasattr(req_states.all_token_ids, "_uva_buf"):
            raise EngineError(
                "engine.ngram.history_tokens > 0 needs pinned host memory, which this machine "
                "does not have; set it to 0"
            )
        super().__init__(ngram)
        self._states = req_states

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

    def known(self) -> Iterable[str]:
        return self._states.req_id_to_index.keys()


class OwnTextV2(Lookup):
    """Drafts from the request's own text, with vLLM's kernels on the device."""

    def __init__(self, config: Any, device: torch.device, req_states: Any) -> None:
        if not compat.counts_drafts():
            raise EngineError(
                "engine.ngram.history_tokens = 0 on GPUs needs vLLM 0.32; set it to 1_000_000, or "
                "pip install 'vllm>=0.32'"
            )
        from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

        self._speculator = NgramGPUSpeculator(config, device, req_states)

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
