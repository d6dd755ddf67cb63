"""vLLM's n-gram drafter, looking in the `History` of all samples instead of one request's text.

Import it late: vLLM's start-up on CPU walks all loaded modules and trips over those of numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from tlt.rollout.vllm.history import History


class HistoryProposer(NgramProposer):
    """Drafts what followed in other samples too. A subclass only because vLLM asks for one.

    It learns when it is asked to draft, everything since it was asked last; and from requests that
    end, so that those which ran while another arm drafted are known as well. A new policy changes
    nothing: what the one before it said is still the best guess.
    """

    def __init__(self, vllm_config: Any, runner: Any, ngram: dict[str, int]) -> None:
        # Not vLLM's own __init__: it prepares, and compiles, the lookup that this replaces.
        self.k: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.history = History(ngram["history_tokens"], ngram["min_match"], ngram["max_match"])
        # The runner, not its input batch: that is made anew when the KV cache is set up.
        self._runner = runner
        self.history.draft([], [], [], np.zeros((1, 1), dtype=np.int32), [])  # compiles it

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """As vLLM calls it: nothing is drafted for rows in which nothing was sampled."""
        assert num_speculative_tokens <= self.k
        if num_speculative_tokens == 0:
            return [[] for _ in sampled_token_ids]  # learned later, when somebody needs it
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
        """Draft as if no sample had been seen yet."""
        batch = self._runner.input_batch
        # Learned now, what the batch still holds of ended requests is not new in the next step.
        self.history.draft(
            batch.req_ids,
            batch.num_prompt_tokens,
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
            [0] * len(batch.req_ids),
        )
        self.history.clear()

    def requests_ended(self, request_ids: Iterable[str]) -> None:
        """Learn what the batch still holds of these requests; call it before it forgets them."""
        batch = self._runner.input_batch
        for request_id in sorted(request_ids):  # the order of a set differs from rank to rank
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                self.history.forget(request_id)  # ended while it was preempted
                continue
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self.history.end(request_id, batch.num_prompt_tokens[row], text)
