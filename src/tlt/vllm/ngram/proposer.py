"""vLLM's n-gram drafter with a lookup in the `History` of all samples.

Import this module late: vLLM's start-up on CPU walks all loaded modules, and fails on those of
numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from tlt.vllm.ngram.history import History


class HistoryProposer(NgramProposer):
    """Drafts from all recent samples. It is a subclass only because vLLM checks the type.

    Every call to draft first learns all tokens since the previous call. Ending requests are learned
    too, so that the history also holds requests that ran while another arm drafted. A new policy
    does not clear the history: the samples of the previous policy are still the best guess.
    """

    def __init__(self, vllm_config: Any, runner: Any, ngram: dict[str, int]) -> None:
        # Without vLLM's own __init__, which would prepare and compile the lookup that we replace.
        self.k: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.history = History(ngram["history_tokens"], ngram["min_match"], ngram["max_match"])
        # The runner, not its input batch: vLLM replaces the batch when it sets up the KV cache.
        self._runner = runner
        self.history.draft([], [], [], np.zeros((1, 1), dtype=np.int32), [])  # compiles the kernels

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for the rows in which a token was sampled. vLLM calls this."""
        assert num_speculative_tokens <= self.k
        if num_speculative_tokens == 0:
            return [[] for _ in sampled_token_ids]  # the next call that drafts learns the tokens
        num_wanted = [
            max(0, min(num_speculative_tokens, self.max_model_len - num_tokens)) if sampled else 0
            for sampled, num_tokens in zip(
                sampled_token_ids, num_tokens_no_spec.tolist(), strict=False
            )
        ]
        batch = self._runner.input_batch
        return self.history.draft(
            batch.req_ids[: len(num_wanted)],
            batch.num_prompt_tokens,
            num_tokens_no_spec,
            token_ids_cpu,
            num_wanted,
        )

    def forget(self) -> None:
        """Forget all samples."""
        batch = self._runner.input_batch
        # Learn the batch first: otherwise the next step would learn its ended requests.
        self.history.draft(
            batch.req_ids,
            batch.num_prompt_tokens,
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
            [0] * len(batch.req_ids),
        )
        self.history.clear()

    def requests_ended(self, request_ids: Iterable[str]) -> None:
        """Learn the rest of these requests. Call it before vLLM drops them from the batch."""
        batch = self._runner.input_batch
        for request_id in sorted(request_ids):  # the order of a set differs between ranks
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                self.history.forget(request_id)  # the request ended while it was preempted
                continue
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self.history.end(request_id, batch.num_prompt_tokens[row], text)
