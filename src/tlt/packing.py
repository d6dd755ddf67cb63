"""Pack sequences of different lengths into rows of a token budget, without padding. Pure.

The input is lengths, the output is groups of indices. Models handle the borders within a row:
positions restart, and attention does not cross them.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices into rows of at most `budget` tokens: best fit, longest first.

    A sequence longer than the budget gets its own row; the caller may shorten it.
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
    """Yield packed rows forever: every epoch has each sequence once, in a new packing and order."""
    while True:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        # `pack` orders equal lengths by index, so a shuffle changes which of them share a row.
        rows = pack([lengths[i] for i in order], budget)
        rng.shuffle(rows)
        for row in rows:
            yield [order[place] for place in row]
