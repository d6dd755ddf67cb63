"""The compiled half of `history`: it writes tokens into the ring buffer and looks them up.

Tokens are numbered from 1 in the order in which they are learned. The ring is a ring buffer: it
holds the last `capacity` tokens, token number i at place i % capacity. A table maps a run of tokens
of one of the `lengths` to the token that followed it; an entry is that token's place plus 1. Runs
are hashed from their last token backwards, within a prompt (scope 0) or overall (scope 1).

A row of `state` is a request: checksum of its prompt, number of its learned tokens, number of the
last learned token. `rows` names the row of `token_ids` that holds the request's text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tlt.vllm.compiled import compiled

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
