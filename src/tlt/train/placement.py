"""Where engines and learner ranks run. The plan is pure; `reserve` holds its places in Ray.

Colocated: every engine has a bundle, and learner ranks use the engines' bundles and devices in turn
with them. Ray books the devices to the engine. A rank asks Ray for nothing; its environment names
its GPU. Separate: ranks have their own bundles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.rollout.client import place_of

Bundle = Mapping[str, float]
OWN_NODE_S = 10.0
"""How long to wait for a place on the driver's node before any other node will do."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The bundles of a run: first one for each engine, then those of ranks with their own."""

    bundles: tuple[Bundle, ...]
    rank_bundles: tuple[int, ...]
    """Bundle of each learner rank; if colocated, its engine's."""
    colocated: bool


def plan_placement(config: TrainConfig) -> PlacementPlan:
    engine, learner = config.engine, config.learner
    num_engines = config.pool.num_engines
    on_gpu = engine.num_gpus > 0
    engine_bundle: dict[str, float] = {"CPU": 1.0 if on_gpu else float(engine.num_cores)}
    if on_gpu:
        engine_bundle["GPU"] = float(engine.num_gpus)
    if config.placement.kind == "colocated":
        if on_gpu and learner.num_ranks != num_engines * engine.num_gpus:
            raise ConfigError(
                f"learner.num_ranks = {learner.num_ranks}, but colocated with {num_engines} "
                f"engines of {engine.num_gpus} GPUs there are as many ranks as GPUs; set it to "
                f"{num_engines * engine.num_gpus}, or placement.kind = 'separate'"
            )
        if bool(learner.num_gpus) != on_gpu:
            raise ConfigError(
                f"learner.num_gpus = {learner.num_gpus} with engine.num_gpus = {engine.num_gpus}: "
                "colocated, both use the same devices; set learner.num_gpus = "
                f"{int(on_gpu)}, or placement.kind = 'separate'"
            )
        per_engine = -(-learner.num_ranks // num_engines)
        rank_bundles = [rank // per_engine for rank in range(learner.num_ranks)]
        own_bundles: tuple[Bundle, ...] = ()
    else:
        rank_bundle = {"CPU": float(learner.num_cores or 1)}
        if learner.num_gpus:
            rank_bundle = {"CPU": 1.0, "GPU": float(learner.num_gpus)}
        own_bundles = (rank_bundle,) * learner.num_ranks
        rank_bundles = list(range(num_engines, num_engines + learner.num_ranks))
    return PlacementPlan(
        bundles=(engine_bundle,) * num_engines + own_bundles,
        rank_bundles=tuple(rank_bundles),
        colocated=config.placement.kind == "colocated",
    )


def check_fits(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a plan that the cluster's nodes cannot hold, before anything waits for them."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(plan.bundles, key=lambda b: (-b.get("GPU", 0), -b["CPU"])):
        for node in free:
            if _holds(node, bundle):
                for kind, amount in bundle.items():
                    node[kind] -= amount
                break
        else:
            wanted = {kind: sum(b.get(kind, 0) for b in plan.bundles) for kind in ("CPU", "GPU")}
            there = {kind: sum(n.get(kind, 0) for n in nodes) for kind in ("CPU", "GPU")}
            raise ConfigError(
                f"the cluster has {there['CPU']:g} cores and {there['GPU']:g} GPUs on "
                f"{len(nodes)} nodes, but the run wants {wanted['CPU']:g} and {wanted['GPU']:g}, "
                "each engine on one node; lower pool.num_engines, "
                f"engine.{'num_gpus' if wanted['GPU'] else 'num_cores'} or learner.num_ranks, or "
                "add nodes"
            )


def _holds(node: Mapping[str, float], bundle: Bundle) -> bool:
    return all(node.get(kind, 0) >= amount for kind, amount in bundle.items())


class Reservation:
    """Bundles held in the cluster, and the options that put an actor into one of them."""

    def __init__(self, plan: PlacementPlan, group: Any) -> None:
        self._plan = plan
        self._group = group
        self._gpus: dict[int, list[str]] = {}

    def engine(self, name: str) -> dict[str, Any]:
        """Return the options of an engine's actor; a successor (`engine-0.1`) takes its place."""
        return self._in_bundle(_slot(name))

    def beside(self, name: str) -> dict[str, Any]:
        """Return the options of the actor that uses an engine's devices while it is idle."""
        options = self.engine(name)
        if gpus := self._gpus.get(_slot(name)):
            options["gpu"] = gpus[0]
        return options

    def gpus_of_engines(self, reports: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Note which GPUs Ray gave to each engine, for the ranks that share them."""
        self._gpus = {_slot(name): list(gpus) for name, gpus in reports}

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the options of a learner rank's actor."""
        index = self._plan.rank_bundles[rank]
        options = self._in_bundle(index)
        if not self._plan.colocated:
            own = self._plan.bundles[index]
            return options | {"num_cpus": int(own["CPU"]), "num_gpus": int(own.get("GPU", 0))}
        options["num_cpus"] = 0
        if gpus := self._gpus.get(index):
            options["gpu"] = gpus[rank - self._plan.rank_bundles.index(index)]
        return options

    def release(self) -> None:
        import ray

        ray.util.remove_placement_group(self._group)

    def _in_bundle(self, index: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
        }


def _slot(engine: str) -> int:
    return int(place_of(engine).removeprefix("engine-"))


async def reserve(plan: PlacementPlan, timeout_s: float) -> Reservation:
    """Hold the plan's bundles, packed on as few nodes as possible.

    The first colocated rank goes to the driver's node if there is room: the policy then reaches the
    engines there through shared memory. Colocated bundles are all equal, so the first one takes no
    other bundle's place.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_fits(plan, [node["Resources"] for node in nodes])
    own = ray.get_runtime_context().get_node_id()
    here: Bundle = next((node["Resources"] for node in nodes if node["NodeID"] == own), {})
    group = None
    if plan.colocated and len(nodes) > 1 and _holds(here, plan.bundles[plan.rank_bundles[0]]):
        selectors: list[dict[str, str]] = [{} for _ in plan.bundles]
        selectors[plan.rank_bundles[0]] = {"ray.io/node-id": own}
        group = await _group(plan, min(timeout_s, OWN_NODE_S), selectors)
    group = group or await _group(plan, timeout_s)
    if group is None:
        raise ConfigError(
            f"the cluster did not free {len(plan.bundles)} places for engines and learner within "
            f"{timeout_s:.0f} s (pool.start_timeout_s); is another run holding them?"
        )
    return Reservation(plan, group)


async def _group(
    plan: PlacementPlan, timeout_s: float, selectors: list[dict[str, str]] | None = None
) -> Any:
    """Return a placement group that holds the bundles, or None if they are not free in time."""
    import ray

    group = ray.util.placement_group(
        [dict(bundle) for bundle in plan.bundles], strategy="PACK", bundle_label_selector=selectors
    )
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        ray.util.remove_placement_group(group)
        return None
    return group
