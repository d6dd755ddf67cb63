"""Time limits that follow the machine's speed (`speed`), one core for each parallel worker, no Hub.

A worker is bound to its core before torch starts threads.
"""

import os

import pytest

from speed import limit, slowness

TIMEOUT_S = 900.0
"""Time limit of one test on the slowest supported kind of machine."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(worker.removeprefix("gw")) % len(_cores)]})


def pytest_configure(config: pytest.Config) -> None:
    slowness()  # before anything else uses the machine


def pytest_report_header(config: pytest.Config) -> str:
    return f"time limits x {slowness():.1f}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit(TIMEOUT_S)))
