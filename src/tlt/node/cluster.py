"""Ray for commands: the cluster that `RAY_ADDRESS` names, or a new one on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any


def start_ray(num_engines: int) -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start one with room for `num_engines`.

    Commands whose engines take turns may ask for more engines than there are cores. Ray finds GPUs
    by itself.
    """
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray runs its workers at the lowest priority, behind all other processes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return
    ray.init(
        "local",
        num_cpus=max(num_engines, os.cpu_count() or 1),
        include_dashboard=False,
        **quiet,
    )


END_S = 10.0
"""Seconds that a killed process may take to release its cores and memory."""


async def end_actors(actors: Iterable[Any]) -> None:
    """Kill actors, and wait until their processes have released their cores and memory."""
    import ray

    actors = list(actors)
    for actor in actors:
        ray.kill(actor)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            # This call fails when the process is gone, and never succeeds.
            gone = [actor.__ray_ready__.remote() for actor in actors]
            await asyncio.gather(*gone, return_exceptions=True)
