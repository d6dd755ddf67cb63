"""What `start_ray` tells Ray about network and token; no Ray starts here."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray._private import ray_constants  # noqa: E402

from tlt.node import cluster  # noqa: E402

VARIABLES = (
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record each `ray.init`, with the address that Ray would take for this node."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards
        del os.environ[name]
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(cluster, "_token", None)
    made: list[dict[str, Any]] = []

    def init(*args: Any, **settings: Any) -> None:
        made.append(settings | {"args": args, "host": ray.util.get_node_ip_address()})

    monkeypatch.setattr(ray, "init", init)
    return made


def test_a_ray_of_our_own_stays_on_loopback_and_has_a_private_token(
    calls: list[dict[str, Any]],
) -> None:
    cluster.start_ray(1)
    (call,) = calls
    assert call["host"] == "127.0.0.1"
    assert call["args"] == ("local",)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert len(token.read_text()) == 64
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (token, *list(token.parents)[:2])]
    assert modes == [0o600, 0o700, 0o700]


def test_the_user_s_token_and_interface_win(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    cluster.start_ray(1)
    assert len(calls) == 1
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_cluster_of_the_user_is_joined_as_it_is(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster.start_ray(1)
    (call,) = calls
    assert call["args"] == ()
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert not {"RAY_AUTH_TOKEN_PATH", "GLOO_SOCKET_IFNAME"} & os.environ.keys()
