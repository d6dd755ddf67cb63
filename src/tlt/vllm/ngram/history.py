"""Recent samples, and the tokens that followed each run of tokens in them.

RL samples the same prompt many times: once per member of its group, and again every epoch. So an
n-gram drafter should look up the end of a request not only in the request's own text, but in every
recent sample, running ones included. Samples of the same prompt come first, then all others. Longer
matches win over shorter ones, and later matches over earlier ones.

Storage: a ring buffer holds the last `capacity` tokens of all samples, in the order in which they
were learned. Two links per token connect the tokens of one sample. Tables map the hash of the last
n tokens to the place of the token that followed them most recently, for a few lengths n, within a
prompt and overall. Entries are never deleted. Instead a lookup compares the tokens it finds with
the tokens it looks for, so an overwritten entry finds nothing. Learning and lookup therefore take a
constant number of memory accesses. A token takes about 70 bytes.

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
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from tlt.vllm.keyed import compiled
from tlt.vllm.runner import Lookup, Texts


class History:
    """Recent samples of at most `capacity` tokens in total."""

    def __init__(self, capacity: int, min_match: int, max_match: int) -> None:
        self._ring: Any = np.zeros((capacity, 4), dtype=np.int32)
        lengths = {min_match}
        while max_match > min_match:
            lengths.add(max_match)
            max_match //= 2
        self._lengths = np.array(sorted(lengths))
        # At least two places per token: few entries collide.
        num_places = 1 << max(16, (2 * capacity - 1).bit_length())
        self._tables: Any = np.zeros((len(lengths), 2, num_places), dtype=np.int32)
        self._num_learned = 0
        # The row of `state` of each running request; see below.
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
        """Drop a request that has ended, without learning its last tokens."""
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


class HistoryLookup(Lookup):
    """Drafts from all recent samples; the subclasses know the texts of vLLM's two runners.

    Every call to draft first learns all tokens since the previous call. It learns ended requests
    too, also those that ran while another arm drafted. A new policy does not clear the history: the
    samples of the previous policy are still the best guess.
    """

    def __init__(self, ngram: dict[str, int]) -> None:
        self.history = History(ngram["history_tokens"], ngram["min_match"], ngram["max_match"])
        self._forgotten: set[str] = set()
        """Requests that ended before the history was forgotten, and may still arrive here."""
        self.history.draft([], [], [], np.zeros((1, 1), dtype=np.int32), [])  # compiles the kernels

    def known(self) -> Iterable[str]:
        """Return the requests that vLLM's runner knows."""
        raise NotImplementedError

    def requests_ended(self, texts: Texts) -> None:
        """Learn the rest of ended requests."""
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
        self._forgotten = set(self.known())
        self.history.clear()


# --- the compiled half --------------------------------------------------------------------------
#
# Tokens are numbered from 1 in the order in which they are learned. The ring holds the last
# `capacity` tokens, token number i at place i % capacity. A table maps a run of tokens of one of
# the `lengths` to the token that followed it; an entry is that token's place plus 1. Runs are
# hashed from their last token backwards, within a prompt (scope 0) or overall (scope 1).
#
# A row of `state` is a request: checksum of its prompt, number of its learned tokens, number of the
# last learned token. `rows` names the row of `token_ids` that holds the request's text.

# Columns of the ring. BACK and NEXT are distances to the neighbouring tokens of the sample, or 0.
TOKEN, BACK, NEXT, PROMPT = range(4)


@compiled
def learn_rows(
    ring: Any,
    tables: Any,
    lengths: Any,
    newest: int,
    token_ids: Any,
    rows: Any,
    num_tokens: Any,
    state: Any,
) -> int:
    """Append the new tokens of each row, and return the number of the newest token."""
    capacity = len(ring)
    for row in range(len(state)):
        prompt, last = state[row, 0], state[row, 2]
        for index in range(state[row, 1], num_tokens[row]):
            newest += 1
            place = newest % capacity
            distance = newest - last if 0 < last > newest - capacity else 0
            ring[place, TOKEN] = token_ids[rows[row], index]
            ring[place, BACK] = distance
            ring[place, NEXT] = 0
            ring[place, PROMPT] = prompt
            if distance:
                ring[last % capacity, NEXT] = distance
                _note(tables, lengths, token_ids, rows[row], index, prompt, place)
            last = newest
        state[row, 1] = max(state[row, 1], num_tokens[row])
        state[row, 2] = last
    return newest


@compiled
def _note(
    tables: Any, lengths: Any, token_ids: Any, row: int, end: int, prompt: int, place: int
) -> None:
    """Note that the token at `place` of the ring followed the tokens before `end`."""
    mixed = np.uint64(0)
    start = end
    for level in range(len(lengths)):
        if lengths[level] > end:
            return
        while end - start < lengths[level]:
            start -= 1
            mixed = _mix(mixed, token_ids[row, start])
        tables[level, 0, _bucket(_mix(mixed, prompt), tables)] = place + 1
        tables[level, 1, _bucket(mixed, tables)] = place + 1


@compiled
def draft_rows(
    ring: Any,
    tables: Any,
    lengths: Any,
    newest: int,
    token_ids: Any,
    rows: Any,
    num_tokens: Any,
    state: Any,
    drafts: Any,
    num_drafted: Any,
) -> None:
    """Copy the tokens that followed each text; where they end too soon, look up their end in turn.

    `num_drafted` holds the number of wanted tokens, and afterwards the number of drafted ones.
    """
    capacity = len(ring)
    longest = lengths[-1]
    text = np.empty(longest + drafts.shape[1], dtype=np.int64)
    for row in range(len(state)):
        size = min(longest, num_tokens[row])
        for index in range(size):
            text[index] = token_ids[rows[row], num_tokens[row] - size + index]
        count = 0
        while count < num_drafted[row]:
            found = _find(ring, tables, lengths, newest, text, size, state[row, 0])
            if found == 0:
                break
            step = 1
            while step > 0 and count < num_drafted[row]:
                token = ring[found % capacity, TOKEN]
                text[size] = token
                drafts[row, count] = token
                size += 1
                count += 1
                step = ring[found % capacity, NEXT]
                found += step
        num_drafted[row] = count


@compiled
def _find(
    ring: Any, tables: Any, lengths: Any, newest: int, text: Any, size: int, prompt: int
) -> int:
    """Return the number of the token that followed the end of `text`; 0 if it is not found."""
    capacity = len(ring)
    hashes: Any = np.zeros(len(lengths), dtype=np.uint64)
    mixed = np.uint64(0)
    num_levels = num_mixed = 0
    while num_levels < len(lengths) and lengths[num_levels] <= size:
        while num_mixed < lengths[num_levels]:
            num_mixed += 1
            mixed = _mix(mixed, text[size - num_mixed])
        hashes[num_levels] = mixed
        num_levels += 1
    for scope in range(2):  # within the prompt, overall
        for level in range(num_levels - 1, -1, -1):
            key = hashes[level] if scope else _mix(hashes[level], prompt)
            place = tables[level, scope, _bucket(key, tables)] - 1
            if place < 0 or (scope == 0 and ring[place, PROMPT] != prompt):
                continue
            found = newest - (newest - place) % capacity
            if _follows(ring, newest, found, text, size, lengths[level]):
                return int(found)
    return 0


@compiled
def _follows(ring: Any, newest: int, number: int, text: Any, size: int, length: int) -> bool:
    """Return whether the last `length` tokens of `text` precede the token of this number."""
    capacity = len(ring)
    for index in range(size - 1, size - 1 - length, -1):
        distance = ring[number % capacity, BACK]
        number -= distance
        if distance == 0 or number <= newest - capacity:
            return False
        if ring[number % capacity, TOKEN] != text[index]:
            return False
    return True


@compiled
def _mix(mixed: Any, value: Any) -> Any:
    return (mixed ^ np.uint64(value + 1)) * np.uint64(0x9E3779B97F4A7C15)


@compiled
def _bucket(mixed: Any, tables: Any) -> Any:
    return (mixed ^ (mixed >> np.uint64(32))) & np.uint64(tables.shape[2] - 1)
