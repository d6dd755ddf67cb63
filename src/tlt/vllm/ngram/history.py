"""Recent samples, and the tokens that followed each run of tokens in them.

RL samples the same prompt many times: once per member of its group, and again every epoch. So an
n-gram drafter should look up the end of a request not only in the request's own text, but in every
recent sample, running ones included. Samples of the same prompt come first, then all others. Longer
matches win over shorter ones, and later matches over earlier ones.

Storage: a ring buffer holds the last `capacity` tokens of all samples, in the order in which they
were learned. Two links per token connect the tokens of one sample. Tables map the hash of the last
n tokens to the place of the token that followed them most recently, for a few lengths n, within a
prompt and overall. Entries are never deleted. Instead a lookup compares the tokens it finds with
those it looked for, so an entry whose tokens were overwritten finds nothing. Learning and lookup
therefore take a constant number of memory accesses. A token takes about 70 bytes.

Why not a library: the suffix trees of `arctic-inference` (vLLM's method "suffix") were tried on 256
samples of SmolLM2 (`benchmarks/history.py`).

| drafter                 | tokens per engine step |
|-------------------------|------------------------|
| this module             | 2.36                   |
| suffix trees            | 2.26                   |
| request's own text only | 1.28                   |

The suffix trees take 370 bytes per token. A batch of 32 takes them a millisecond or two. They are
bounded in samples and not in tokens, are compiled at installation (torch is a build dependency),
and come with a vLLM plug-in that patches the engine. Choosing the most frequent continuation
instead of the latest one did not win on these samples.

Everything here is deterministic, so tensor-parallel ranks with the same inputs draft the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt.vllm.ngram.kernels import draft_rows, learn_rows


class History:
    """Recent samples of at most `capacity` tokens in total."""

    def __init__(self, capacity: int, min_match: int, max_match: int) -> None:
        self._ring: Any = np.zeros((capacity, 4), dtype=np.int32)
        lengths = {min_match}
        while max_match > min_match:
            lengths.add(max_match)
            max_match //= 2
        self._lengths = np.array(sorted(lengths))
        # At least two places per token, so that few entries collide.
        num_places = 1 << max(16, (2 * capacity - 1).bit_length())
        self._tables: Any = np.zeros((len(lengths), 2, num_places), dtype=np.int32)
        self._num_learned = 0
        # The row of `state` of each running request; see `ngram.kernels`.
        self._running: dict[str, tuple[int, int, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the ring buffer and the tables."""
        return int(self._ring.nbytes + self._tables.nbytes)

    def draft(
        self,
        request_ids: Sequence[str],
        num_prompt_tokens: Any,
        num_tokens: Any,
        token_ids: Any,
        num_wanted: Sequence[int],
        rows: Any = None,
    ) -> list[list[int]]:
        """Learn the new tokens of these requests, then draft up to `num_wanted` tokens for each.

        There is one row per request, in any order; the arrays may have more rows. A row of
        `token_ids` holds prompt and response, `num_tokens` tokens in total. `rows` names the row of
        each request in `token_ids` if it is not the first, second and so on. The history learns
        the new tokens of all requests before it drafts.
        """
        num_tokens = np.asarray(num_tokens, dtype=np.int64)
        rows = np.arange(len(request_ids)) if rows is None else np.asarray(rows, dtype=np.int64)
        state = self._learn(request_ids, num_prompt_tokens, num_tokens, token_ids, rows)
        drafts: Any = np.zeros((len(request_ids), max(num_wanted, default=0)), dtype=np.int64)
        num_drafted = np.array(num_wanted, dtype=np.int64)
        draft_rows(
            self._ring,
            self._tables,
            self._lengths,
            self._num_learned,
            token_ids,
            rows,
            num_tokens,
            state,
            drafts,
            num_drafted,
        )
        drafted = zip(drafts.tolist(), num_drafted.tolist(), strict=True)
        return [draft[:length] for draft, length in drafted]

    def end(self, request_id: str, num_prompt_tokens: int, token_ids: Any) -> None:
        """Learn the rest of a request that has ended. A later request may reuse its name."""
        num_tokens = np.array([len(token_ids)], dtype=np.int64)
        first_row: Any = np.zeros(1, dtype=np.int64)
        self._learn([request_id], [num_prompt_tokens], num_tokens, token_ids[np.newaxis], first_row)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, without learning the rest of it."""
        self._running.pop(request_id, None)

    def clear(self) -> None:
        """Forget all tokens learned so far; running requests stay known."""
        self._tables.fill(0)

    def _learn(
        self,
        request_ids: Sequence[str],
        num_prompt_tokens: Any,
        num_tokens: Any,
        token_ids: Any,
        rows: Any,
    ) -> Any:
        for row, request_id in enumerate(request_ids):
            if request_id not in self._running:
                prompt = token_ids[rows[row], : num_prompt_tokens[row]]
                self._running[request_id] = (_checksum(prompt), 0, 0)
        state = np.array([self._running[i] for i in request_ids], dtype=np.int64).reshape(-1, 3)
        self._num_learned = learn_rows(
            self._ring,
            self._tables,
            self._lengths,
            self._num_learned,
            token_ids,
            rows,
            num_tokens,
            state,
        )
        self._running.update(zip(request_ids, map(tuple, state.tolist()), strict=True))
        return state


def _checksum(prompt: Any) -> int:
    return zlib.crc32(prompt.tobytes()) >> 1
