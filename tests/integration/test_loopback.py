"""A Ray that TLT starts for one machine: who reaches its ports, and with which token."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from listeners import beyond_loopback, listening, reached_from_outside
from speed import limit

pytestmark = [pytest.mark.ray]

CLUSTER = """
import json, os, sys
import ray  # before `start_ray`, as in a run
from tlt.node.cluster import start_ray

start_ray(1)

class Rank:
    def meet(self):
        import torch.distributed as dist
        from tlt.node.shared import SharedFolder
        self.folder = SharedFolder.make("meeting")
        meeting = f"file://{self.folder.path / 'ranks'}"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        dist.barrier()
        return ray.util.get_node_ip_address()

rank = ray.remote(Rank).remote()
host = ray.get(rank.meet.remote())
gcs = ray.get_runtime_context().gcs_address
facts = {"host": host, "gcs": gcs, "token": os.environ["RAY_AUTH_TOKEN_PATH"]}
print(json.dumps(facts), flush=True)
sys.stdin.read()
"""
JOIN = """
import sys
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # or Ray looks for a node at this machine's own address
import ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.1", log_to_driver=False)
print("joined", ray.get(ray.remote(lambda: 1).remote()))
"""


def environment() -> dict[str, str]:
    """Return the environment of a user who has set nothing about Ray's network or its token."""
    set_by_user = ("RAY_", "GLOO_", "NCCL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(set_by_user)}


@contextmanager
def cluster(home: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"HOME": str(home)},
    ) as process:
        assert process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())


def joins(gcs: str, home: Path, **token: str) -> bool:
    """Return whether another process that has this token runs code in the cluster."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN, gcs],
            capture_output=True,
            text=True,
            timeout=limit(60),
            env=environment() | {"HOME": str(home)} | token,
        )
    except subprocess.TimeoutExpired:
        return False
    return "joined 1" in done.stdout


@pytest.mark.gate
def test_a_ray_for_one_machine_is_reached_only_from_there(tmp_path: Path) -> None:
    with cluster(tmp_path) as (pid, facts):
        assert facts["host"] == "127.0.0.1"
        found = listening(pid)
        names = {process.name() for process in psutil.Process(pid).children(recursive=True)}
        assert {"gcs_server", "raylet"} <= names, "the scan sees Ray's processes"
        assert int(facts["gcs"].rpartition(":")[2]) in {port for _, port in found}
        assert beyond_loopback(found) == set()
        assert reached_from_outside({port for _, port in found}) == set()
    assert not psutil.pid_exists(pid)


def test_nobody_joins_without_the_token_that_only_its_user_can_read(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, facts):
        token = Path(facts["token"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.parent.stat().st_mode) == 0o700
        assert not (tmp_path / ".ray" / "auth_token").exists()
        right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        assert joins(facts["gcs"], tmp_path, **right)
        wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        assert not joins(facts["gcs"], tmp_path, **wrong)
        assert not joins(facts["gcs"], tmp_path, RAY_AUTH_MODE="disabled")
