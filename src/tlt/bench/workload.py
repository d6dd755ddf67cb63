"""The response lengths of a benchmark: from a file, drawn, or natural.

Fixed lengths make all modes do exactly the same work. They come from a file or from a log-normal
distribution with a tail like reasoning models': most responses are short, a few very long.
Natural responses end by themselves. They have the same seeds in all modes, so in float32 all modes
generate the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError

MOST_TOKENS = 10_000_000
"""Longest response."""


def read_lengths(path: Path) -> list[int]:
    """Read lengths from a JSON list, or from a text file with one number per line."""
    try:
        text = path.read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        lengths = [int(value) for value in values]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no response lengths ({error}); e.g. [60, 75, 1500]"
        ) from error
    if not lengths or not all(1 <= length <= MOST_TOKENS for length in lengths):
        raise ConfigError(
            f"{path}: expected response lengths from 1 to {MOST_TOKENS}; e.g. [60, 75, 1500]"
        )
    return lengths


def describe(source: Mapping[str, int] | str, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the lengths and their summary, as plain data; a source may be `file` or `natural`."""
    ordered = sorted(lengths)
    return {
        "source": source,
        "num_requests": len(ordered),
        "total_tokens": sum(ordered),
        "median": ordered[len(ordered) // 2],
        "longest": ordered[-1],
        "lengths": list(lengths),
    }
