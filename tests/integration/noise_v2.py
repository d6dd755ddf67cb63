"""The noise of vLLM's V2 runner in numpy, many rows at once: its kernel is slow to interpret.

A test compares this with the kernel. What follows from the noise is then tested on many draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _rotate(value: Any, bits: int) -> Any:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _mix(state: Any, word: Any) -> Any:
    word = _rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _hash(seed: Any, position: Any, token: Any) -> Any:
    """Return 32 bits for arrays of numbers (murmur3)."""
    low = np.uint64(0xFFFFFFFF)
    state = np.zeros(np.broadcast_shapes(seed.shape, position.shape, token.shape), np.uint32)
    words = (seed & low, seed >> np.uint64(32), position & low, token & low)
    for word in words:
        state = _mix(state, word.astype(np.uint32))
    state = state ^ np.uint32(16)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def gumbel(seed: Any, position: Any, vocab: int) -> Any:
    """Return Gumbel noise [R, V] for the seeds and positions [R] of draws."""
    token: Any = np.arange(vocab, dtype=np.uint64)
    seed = np.asarray(seed, np.uint64)[:, None]
    bits = _hash(seed, np.asarray(position, np.uint64)[:, None], token)
    return -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))


def draw(logits_RV: Any, seed: Any, position: Any) -> Any:
    """Return the token drawn in each row [R]."""
    return (logits_RV + gumbel(seed, position, logits_RV.shape[1])).argmax(-1)
