"""The GPU recipes on a simulated Ray cluster: 4 nodes that claim 8 GPUs each, no hardware."""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from speed import limit
from tlt.config.load import load_config
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.train.placement import PlacementPlan, Reservation, plan_placement, reserve

pytestmark = pytest.mark.ray

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_NODES = 4
TIMEOUT_S = limit(60.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    # A folder of its own: the cluster writes its address there, and other runs on this machine
    # must not find it. A short path, because sockets are in it.
    folder = tempfile.mkdtemp(prefix="tlt-ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # of 16 cores that are not there
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes = Cluster()
        try:
            for _ in range(NUM_NODES):
                nodes.add_node(num_cpus=16, num_gpus=8, include_dashboard=False)
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def plan_of(recipe: str, *overrides: str) -> PlacementPlan:
    return plan_placement(load_config(TrainConfig, CONFIGS / f"{recipe}.toml", overrides))


@asynccontextmanager
async def reserved(plan: PlacementPlan) -> AsyncIterator[Reservation]:
    reservation = await reserve(plan, TIMEOUT_S)
    try:
        yield reservation
    finally:
        reservation.release()  # ends the actors in it, too
        await all_free()


async def all_free() -> None:
    """Wait until the cluster has all of its GPUs: it frees them after a release."""
    import ray

    async with asyncio.timeout(TIMEOUT_S):
        while ray.available_resources().get("GPU", 0) < NUM_NODES * 8:
            await asyncio.sleep(0.05)


def nodes_of_bundles() -> dict[int, str]:
    """Return the node of each bundle of the only reservation there is."""
    import ray

    tables = ray.util.placement_group_table().values()
    (created,) = [table for table in tables if table["state"] == "CREATED"]
    return created["bundles_to_node_id"]


def gpus_by_node(plan: PlacementPlan, places: dict[int, str]) -> list[int]:
    used: Counter[str] = Counter()
    for index, bundle in enumerate(plan.bundles):
        used[places[index]] += int(bundle["GPU"])
    return list(used.values())


async def probe(options: dict[str, Any], **asked: float) -> tuple[str, list[str]]:
    """Return node and GPUs of a new actor, which stays until its bundle is released."""
    import ray

    class Probe:  # in here it travels by value: workers cannot import this file
        def where(self) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    actor = ray.remote(Probe).options(lifetime="detached", **(asked | options)).remote()
    async with asyncio.timeout(TIMEOUT_S):
        return await actor.where.remote()


async def test_one_node_with_engines_and_ranks_in_turn() -> None:
    plan = plan_of("qwen2_5_7b_math_8gpu")
    async with reserved(plan) as reservation:
        places = nodes_of_bundles()
        assert len(places) == 8
        assert len(set(places.values())) == 1
        reports = []
        for name in ("engine-0", "engine-7"):
            node, gpus = await probe(reservation.engine(name), num_cpus=1, num_gpus=1)
            assert node == places[int(name[-1])]
            assert len(gpus) == 1
            reports.append((name, gpus))
        assert reports[0][1] != reports[1][1]
        reservation.gpus_of_engines(reports)
        for name, gpus in reports:
            # While the engine holds its device: a rank asks Ray for none and is told which.
            options = reservation.rank(int(name[-1]))
            assert options.pop("gpu") == gpus[0]
            node, _ = await probe(options)
            assert node == places[plan.rank_bundles[int(name[-1])]]


async def test_four_nodes_with_devices_of_their_own() -> None:
    plan = plan_of("qwen2_5_32b_math_4nodes")
    async with reserved(plan) as reservation:
        places = nodes_of_bundles()
        assert gpus_by_node(plan, places) == [8] * NUM_NODES  # all of them, none twice
        node, gpus = await probe(reservation.engine("engine-3"), num_cpus=1, num_gpus=4)
        assert node == places[3]
        assert len(set(gpus)) == 4
        node, gpus = await probe(reservation.rank(15))
        assert node == places[plan.rank_bundles[15]]
        assert len(gpus) == 1


async def test_engines_and_ranks_share_the_gpus_of_all_nodes() -> None:
    plan = plan_of("qwen3_32b_math_4nodes")
    assert plan.colocated
    async with reserved(plan):
        places = nodes_of_bundles()
        assert gpus_by_node(plan, places) == [8] * NUM_NODES
        # Harvest: every engine has ranks on its node, whose states its trainer reads.
        assert {places[b] for b in plan.rank_bundles} == {
            places[b] for b in range(len(plan.bundles))
        }


async def test_what_needs_more_nodes_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"pool\.num_engines"):
        await reserve(plan_of("qwen2_5_32b_math_4nodes", "pool.num_engines=5"), TIMEOUT_S)


async def test_places_that_others_hold_are_waited_for_and_then_given_up() -> None:
    plan = plan_of("qwen2_5_32b_math_4nodes")
    async with reserved(plan):
        with pytest.raises(ConfigError, match=r"pool\.start_timeout_s"):
            await reserve(plan, 2.0)
    async with reserved(plan):
        pass
