"""Lookups on vLLM's V1 runner: in all recent samples, or in the request's own text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from tlt.vllm.ngram.history import HistoryLookup
from tlt.vllm.runner import Lookup


class HistoryV1(HistoryLookup):
    """Drafts from all recent samples."""

    def __init__(self, runner: Any, max_model_len: int, ngram: dict[str, int]) -> None:
        super().__init__(ngram)
        # The runner, not its input batch: vLLM replaces the batch when it sets up the KV cache.
        self._runner = runner
        self._max_model_len = max_model_len

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
    ) -> list[list[int]]:
        """Learn the tokens since the last call, and draft for rows in which one was sampled."""
        num_wanted = [
            max(0, min(num_speculative_tokens, self._max_model_len - num_tokens)) if sampled else 0
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

    def known(self) -> Iterable[str]:
        return self._runner.input_batch.req_id_to_index.keys()


class OwnTextV1(Lookup):
    """Drafts from the request's own text, with vLLM's lookup."""

    def __init__(self, config: Any) -> None:
        self._proposer = NgramProposer(config)

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
    ) -> list[list[int]]:
        """Draft for the rows in which a token was sampled."""
        return self._proposer.propose(
            num_speculative_tokens, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
        )
