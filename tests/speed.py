"""How slow this machine is, and how much of the tests it is to run.

The speed is measured once, and limits of time follow it. A limit is written for the slowest kind of
machine the tests are meant for, two quiet cores without bfloat16 instructions; `limit` stretches it
where even less is to be had: a slower processor, or one that others use too.
"""

from __future__ import annotations

import os
import statistics
import time

QUIET_S = 0.12
"""What `_work` takes on such a machine."""
KNOWN = "TLT_TEST_SLOWNESS"


def _work() -> float:
    """Some of what tests wait for: interpreted code and small matrix products; its seconds."""
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
    """Return how many times as long things take here, at least 1."""
    if KNOWN not in os.environ:  # child processes and workers of pytest-xdist inherit it
        measured_s = statistics.median(_work() for _ in range(5))
        os.environ[KNOWN] = str(max(1.0, measured_s / QUIET_S))
    return float(os.environ[KNOWN])


def by_size(gate: int, all_: int) -> int:
    """Return the size of a test: smaller in the gate than in `make check-all`."""
    return all_ if os.environ.get("CHECK_ALL") == "1" else gate


def limit(seconds: float) -> float:
    """Return a limit of time for this machine."""
    return seconds * slowness()
