"""Tests that run side by side have a core each, before torch starts its threads."""

import os

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(worker.removeprefix("gw")) % len(_cores)]})
