"""How much a trainer moves when it leaves a GPU to the engine, and how long that may take. Pure.

Between leases a trainer's float32 weights, both optimizer moments and the mean of its weights wait
in host memory. Gradients are dropped, and the policy's head and embedding have a copy on the host
anyway. A lease may be called back while the trainer still moves in, so the time covers both ways.
"""

from __future__ import annotations

FLOAT32 = 4
STOP_S = 2.0
"""Seconds in which a trainer breaks off its work, on any device."""
COPY_BYTES_PER_S = 4e9
"""Pace of a copy between a GPU and pageable host memory: assumed, at the low end. Pinned memory is
several times as fast; the first leases do not have it yet."""


def moved_bytes(num_parameters: int, averaged: bool) -> int:
    """Return the bytes of a trainer that go to the host when its lease ends."""
    return FLOAT32 * num_parameters * (3 + averaged)


def stop_timeout_s(num_parameters: int, averaged: bool, end_bytes: int, on_gpu: bool) -> float:
    """Return the seconds that a trainer may take to stop before it is killed.

    `end_bytes` are those of the policy's head and embedding, which only move in.
    """
    if not on_gpu:
        return STOP_S
    return STOP_S + (2 * moved_bytes(num_parameters, averaged) + end_bytes) / COPY_BYTES_PER_S
