"""Ray for commands: the cluster that `RAY_ADDRESS` names, or a new one on this machine.

A new cluster serves only this machine: its processes, and the processes they start, listen on
127.0.0.1, and Ray asks for a token that only this user can read. Anyone who reaches Ray with its
token runs code as its user.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Iterable
from typing import Any

from tlt.node.shared import SharedFolder, open_file

_token: SharedFolder | None = None
"""Folder of the token, held as long as this process lives."""


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
    _stay_on_loopback()
    _make_token()
    num_cpus = max(num_engines, os.cpu_count() or 1)
    ray.init("local", num_cpus=num_cpus, include_dashboard=False, **quiet)


def _stay_on_loopback() -> None:
    """Let Ray, gloo and NCCL use no network but loopback; the user's interfaces win."""
    from ray._private import ray_constants

    # `_node_ip_address` cannot do this: Ray replaces a loopback address by one that others reach,
    # unless it supports no clusters here. It reads the variable when it is imported, as it is now.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def _make_token() -> None:
    """Write the token of a new Ray; the user's token or `RAY_AUTH_MODE` wins.

    Ray would write one into the home folder, readable by all users under the usual umask. By itself
    it turns tokens on for a cluster of one machine.
    """
    global _token
    given = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in given):
        return
    _token = SharedFolder.make("ray")
    with open_file(_token.path / "token", "xb") as file:
        file.write(secrets.token_hex(32).encode())
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token.path / "token")


def this_node() -> str:
    """Return the node of this process in Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


PR_SET_PDEATHSIG = 1
"""Option of `prctl` that sets the signal for a parent's death, from linux/prctl.h."""


def end_with_ray() -> None:
    """Let the kernel kill this worker of Ray when Ray dies on this node, as with the driver.

    Ray leaves that to its workers. A worker that is stopped (SIGSTOP) would never notice, and hold
    its cores, its memory and its files in shared memory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
