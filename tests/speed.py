"""The speed of this machine, and the time limits and sizes of tests.

Time limits are written for the slowest supported kind of machine: two quiet cores without bfloat16
instructions. `limit` stretches them on a slower or a busy machine. The speed is measured once.
"""

from __future__ import annotations

import os
import statistics
import time

QUIET_S = 0.12
"""Seconds of `_work` on the slowest supported kind of machine."""
KNOWN = "TLT_TEST_SLOWNESS"


def _work() -> float:
    """Return the seconds of typical work of tests: interpreted code and small matrix products."""
    import numpy as np

    matrix = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    started_s = time.perf_counter()
    total = 0
    for number in range(1_500_000):
        total += number & 7
    for _ in range(40):
        matrix = np.tanh(matrix @ matrix)
    return time.perf_counter() - started_s


def slowness() -> float:
    """Return how many times as long work takes on this machine, at least 1."""
    if KNOWN not in os.environ:  # child processes and workers of pytest-xdist inherit the value
        measured_s = statistics.median(_work() for _ in range(5))
        os.environ[KNOWN] = str(max(1.0, measured_s / QUIET_S))
    return float(os.environ[KNOWN])


def by_size(gate: int, all_: int) -> int:
    """Return the size of a test: smaller in the gate than in `make check-all`."""
    return all_ if os.environ.get("CHECK_ALL") == "1" else gate


def limit(seconds: float) -> float:
    """Return a time limit stretched for this machine."""
    return seconds * slowness()
