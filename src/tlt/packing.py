"""Variable-length sequences in rows of a token budget, so that no row is padded.

Pure: lengths in, groups of indices out. What a row means to a model (positions that start again,
no attention across borders) is the model's business.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped into rows of at most `budget` tokens: best fit, longest first.

    A sequence longer than the budget gets a row of its own; shortening it is the caller's choice.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = bisect_left(room, (length, -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = budget, len(rows)
            rows.append([])
        rows[row].append(index)
        if free - length > 0:
            insort(room, (free - length, row))
    return rows


def epochs(lengths: Sequence[int], budget: int, rng: random.Random) -> Iterator[list[int]]:
    """Packed rows without end: every epoch holds each sequence once, packed and ordered anew."""
    while True:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        # Equal lengths are told apart by their place, so a shuffle gives other neighbours.
        rows = pack([lengths[i] for i in order], budget)
        rng.shuffle(rows)
        for row in rows:
            yield [order[place] for place in row]
