"""Harvest on the replicas of another framework: what it hears of them, and sends to them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from safetensors.torch import save_file  # noqa: E402

from tlt.errors import ConfigError  # noqa: E402
from tlt.integrations import replicas  # noqa: E402
from tlt.integrations.replicas import LoadWatch, Replicas, Whereabouts  # noqa: E402
from tlt.node.weights import read_weights  # noqa: E402


class Heard:
    """Harvest, as far as it hears of the load."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def rollout_started(self, num_samples: int) -> None:
        self.said.append(num_samples)

    def sample_finished(self) -> None:
        self.said.append("sample")

    def idle(self, engine: str) -> None:
        self.said.append(("idle", engine))

    async def needed(self, engine: str) -> None:
        self.said.append(("needed", engine))


async def heard(*loads: list[int]) -> tuple[list[Any], float]:
    """Return what harvest hears when these loads are seen, a second apart, and the idle time."""
    harvest, seconds = Heard(), iter(range(100))
    watch = LoadWatch(harvest, ["a", "b"], lambda: float(next(seconds)))
    for load in loads:
        await watch.see(load)
    return harvest.said, watch.idle_s


async def test_a_replica_is_idle_while_others_generate() -> None:
    said, idle_s = await heard([2, 2], [2, 1], [1, 0], [1, 0], [0, 0])
    assert said == [4, "sample", "sample", "sample", ("idle", "b"), "sample"]
    assert idle_s == 2.0


async def test_no_replica_is_idle_before_requests_come_or_after_all_have_ended() -> None:
    assert await heard([0, 0], [0, 0]) == ([], 0.0)
    said, _ = await heard([1, 1], [0, 0])
    assert said == [2, "sample", "sample"]


async def test_a_replica_that_gets_a_request_is_needed() -> None:
    said, idle_s = await heard([1, 0], [1, 1], [1, 1])
    assert said == [1, ("idle", "b"), 2, ("needed", "b")]
    assert idle_s == 1.0


# --- calls of replicas --------------------------------------------------------------------------


class Server:
    """The actor of a replica: `remote` returns something to await."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.loaded: dict[str, Any] = {}
        self.fails = ""
        self.collective_rpc = SimpleNamespace(remote=self._rpc)
        self.actor = SimpleNamespace()

    async def _rpc(self, method: str, args: tuple[Any, ...]) -> None:
        if method == self.fails:
            raise AttributeError(method)
        self.calls.append((method, args[0]))
        if method == "tlt_swap_drafter":
            self.loaded = {name: t.clone() for name, t in read_weights(args[0]["path"])}

    @property
    def __ray_call__(self) -> Any:
        async def call(function: Callable[..., Any], *args: Any) -> Any:
            return function(self.actor, *args)

        return SimpleNamespace(remote=call)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    places = iter([Whereabouts("n", "", (4, 5)), Whereabouts("n", "", (4, 5))])
    monkeypatch.setattr(replicas, "_whereabouts", lambda server: next(places))
    return [Server(), Server()]


async def test_all_replicas_record_and_one_shares_embedding_and_head(
    servers: list[Server], tmp_path: Path
) -> None:
    found = Replicas(servers, 0)
    await found.start({"folder": str(tmp_path / "samples")})
    record = ("tlt_record", {"folder": str(tmp_path / "samples")})
    file = tmp_path / "samples-policy" / "embed_and_head.safetensors"
    assert [server.calls for server in servers] == [
        [record, ("tlt_share_embed_and_head", str(file))],
        [record],
    ]
    assert [found.cores(engine) for engine in found.engines] == [(4,), (5,)]
    assert await found.embed_and_head() == {}
    file.parent.mkdir()
    save_file({"lm_head.weight": torch.ones(2, 3)}, file)
    assert (await found.embed_and_head())["lm_head.weight"].tolist() == [[1.0] * 3] * 2


async def test_replicas_without_tlt_are_refused(servers: list[Server], tmp_path: Path) -> None:
    servers[1].fails = "tlt_record"
    with pytest.raises(ConfigError, match="TLT_CONFIG must name a drafter"):
        await Replicas(servers, 0).start({"folder": str(tmp_path)})


async def test_a_drafter_reaches_all_replicas_and_leaves_no_file(servers: list[Server]) -> None:
    found = Replicas(servers, 0, share=lambda packed: packed)
    seconds = await found.update_drafter([("fc.weight", torch.arange(6.0))], 3)
    assert len(seconds) == 2
    assert found.version == 3
    for server in servers:
        assert server.loaded["fc.weight"].tolist() == list(range(6))
        ((_, manifest),) = server.calls
        assert not Path(manifest["path"]).exists(), json.dumps(manifest)


async def test_a_replica_that_refuses_a_drafter(servers: list[Server]) -> None:
    servers[0].fails = "tlt_swap_drafter"
    found = Replicas(servers, 0, share=lambda packed: packed)
    with pytest.raises(AttributeError):
        await found.update_drafter([("fc.weight", torch.arange(6.0))], 3)
    assert found.version == 0
