"""What was sampled lately, and what followed each run of tokens in it.

In RL the same prompt is sampled many times: by its siblings in the group, and again every epoch.
So the text that the end of a request is looked up in is not only its own, but that of every recent
sample, running ones included: first the samples of the same prompt, its own among them, then all
the others. Longer matches win over shorter ones, later ones over earlier ones.

How it is kept. A ring holds the last `capacity` tokens of all samples, in the order in which they
were learned; two links per token tie those of one sample together. Tables lead from the hash of
the last n tokens to the place of the token that followed them when they were seen last, for a few
lengths n, within a prompt and overall. An entry is never deleted: what it leads to is compared
with what was looked for, so one that was overwritten just finds nothing. Learning and looking up
therefore take the same few memory accesses however much is known, and about 70 bytes a token.

Why not a library: the suffix trees of `arctic-inference` (vLLM's method "suffix") were tried. On
256 samples of SmolLM2 (`benchmarks/history.py`) they gave 2.26 tokens a step, this 2.36, the
request's own text alone 1.28. They take 370 bytes a token and a millisecond or two for a batch of
32, are bounded in samples and not in tokens, are compiled when installed (torch is a build
dependency), and come with a vLLM plug-in that patches the engine. Choosing the most frequent
continuation instead of the last one did not win on those samples.

Everything here is deterministic, so tensor-parallel ranks that are told the same draft the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt.rollout.vllm.history_kernels import draft_rows, learn_rows


class History:
    """Recent samples, of at most `capacity` tokens in all."""

    def __init__(self, capacity: int, min_match: int, max_match: int) -> None:
        self._ring: Any = np.zeros((capacity, 4), dtype=np.int32)
        lengths = {min_match}
        while max_match > min_match:
            lengths.add(max_match)
            max_match //= 2
        self._lengths = np.array(sorted(lengths))
        # At least two places for each token, so that few entries meet in one.
        num_places = 1 << max(16, (2 * capacity - 1).bit_length())
        self._tables: Any = np.zeros((len(lengths), 2, num_places), dtype=np.int32)
        self._num_learned = 0
        # Of each running request: its prompt's checksum, its tokens learned, where the last one is.
        self._running: dict[str, tuple[int, int, int]] = {}

    @property
    def num_bytes(self) -> int:
        return int(self._ring.nbytes + self._tables.nbytes)

    def draft(
        self,
        request_ids: Sequence[str],
        num_prompt_tokens: Any,
        num_tokens: Any,
        token_ids: Any,
        num_wanted: Sequence[int],
    ) -> list[list[int]]:
        """Learn what is new in these requests, then draft up to `num_wanted` tokens for each.

        One row per request, in any order; the arrays may have more. `token_ids` holds prompt and
        response, `num_tokens` of them. Whatever a request was given since it was seen last is
        learned now, of all of them before the first draft.
        """
        num_tokens = np.asarray(num_tokens, dtype=np.int64)
        state = self._learn(request_ids, num_prompt_tokens, num_tokens, token_ids)
        drafts: Any = np.zeros((len(request_ids), max(num_wanted, default=0)), dtype=np.int64)
        num_drafted = np.array(num_wanted, dtype=np.int64)
        draft_rows(
            self._ring,
            self._tables,
            self._lengths,
            self._num_learned,
            token_ids,
            num_tokens,
            state,
            drafts,
            num_drafted,
        )
        rows = zip(drafts.tolist(), num_drafted.tolist(), strict=True)
        return [draft[:length] for draft, length in rows]

    def end(self, request_id: str, num_prompt_tokens: int, token_ids: Any) -> None:
        """Learn the rest of a request that has ended; its name may come back for another one."""
        num_tokens = np.array([len(token_ids)], dtype=np.int64)
        self._learn([request_id], [num_prompt_tokens], num_tokens, token_ids[np.newaxis])
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended; what is not yet learned of it is lost."""
        self._running.pop(request_id, None)

    def clear(self) -> None:
        """Find nothing of what is known so far; requests go on from where they are."""
        self._tables.fill(0)

    def _learn(
        self, request_ids: Sequence[str], num_prompt_tokens: Any, num_tokens: Any, token_ids: Any
    ) -> Any:
        for row, request_id in enumerate(request_ids):
            if request_id not in self._running:
                prompt = token_ids[row, : num_prompt_tokens[row]]
                self._running[request_id] = (zlib.crc32(prompt.tobytes()) >> 1, 0, 0)
        state = np.array([self._running[i] for i in request_ids], dtype=np.int64).reshape(-1, 3)
        self._num_learned = learn_rows(
            self._ring,
            self._tables,
            self._lengths,
            self._num_learned,
            token_ids,
            num_tokens,
            state,
        )
        self._running.update(zip(request_ids, map(tuple, state.tolist()), strict=True))
        return state
