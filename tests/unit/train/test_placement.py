"""Who runs where: plans hold everything once, and only what fits is accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import small_run

from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.train.placement import PlacementPlan, Reservation, check_fits, plan_placement


def config(kind: str, num_engines: int, num_ranks: int, **more: dict[str, Any]) -> TrainConfig:
    return small_run(
        placement={"kind": kind},
        pool={"num_engines": num_engines},
        engine=more.get("engine", {}),
        learner={"num_ranks": num_ranks, **more.get("learner", {})},
    )


def gpus(kind: str, num_engines: int, per_engine: int, num_ranks: int) -> TrainConfig:
    return config(
        kind, num_engines, num_ranks, engine={"num_gpus": per_engine}, learner={"num_gpus": 1}
    )


def total(bundles: Sequence[Mapping[str, float]], kind: str) -> float:
    return sum(bundle.get(kind, 0) for bundle in bundles)


counts = st.integers(1, 12)


@given(num_engines=counts, engine_cores=counts, num_ranks=counts, rank_cores=st.none() | counts)
def test_cpu_plans(
    num_engines: int, engine_cores: int, num_ranks: int, rank_cores: int | None
) -> None:
    more: dict[str, Any] = {
        "engine": {"num_cores": engine_cores},
        "learner": {"num_cores": rank_cores},
    }
    shared = plan_placement(config("colocated", num_engines, num_ranks, **more))
    check_plan(shared, num_engines, num_ranks)
    assert total(shared.bundles, "CPU") == num_engines * engine_cores
    own = plan_placement(config("separate", num_engines, num_ranks, **more))
    check_plan(own, num_engines, num_ranks)
    assert total(own.bundles, "CPU") == num_engines * engine_cores + num_ranks * (rank_cores or 1)
    assert total([*shared.bundles, *own.bundles], "GPU") == 0


@given(num_engines=counts, per_engine=st.integers(1, 8), num_ranks=counts)
def test_gpu_plans(num_engines: int, per_engine: int, num_ranks: int) -> None:
    shared = plan_placement(gpus("colocated", num_engines, per_engine, num_engines * per_engine))
    check_plan(shared, num_engines, num_engines * per_engine)
    assert total(shared.bundles, "GPU") == num_engines * per_engine
    # As many ranks in a bundle as GPUs.
    for bundle in range(num_engines):
        assert shared.rank_bundles.count(bundle) == per_engine
    own = plan_placement(gpus("separate", num_engines, per_engine, num_ranks))
    check_plan(own, num_engines, num_ranks)
    assert total(own.bundles, "GPU") == num_engines * per_engine + num_ranks


def check_plan(plan: PlacementPlan, num_engines: int, num_ranks: int) -> None:
    """Each engine and rank has a bundle; nobody shares but ranks with their engine."""
    assert len(plan.rank_bundles) == num_ranks
    engines = range(num_engines)
    assert {*engines, *plan.rank_bundles} == set(range(len(plan.bundles)))
    if plan.colocated:
        assert set(plan.rank_bundles) <= set(engines)
        assert list(plan.rank_bundles) == sorted(plan.rank_bundles)
        loads = [plan.rank_bundles.count(engine) for engine in engines]
        assert max(loads) == -(-num_ranks // num_engines)
    else:
        assert not {*engines} & {*plan.rank_bundles}
        assert len(set(plan.rank_bundles)) == num_ranks


def test_cpu_engines_may_serve_a_learner_on_a_gpu_of_its_own() -> None:
    plan = plan_placement(config("separate", 2, 1, learner={"num_gpus": 1}))
    assert [bundle.get("GPU", 0) for bundle in plan.bundles] == [0, 0, 1]


node = st.fixed_dictionaries({"CPU": st.integers(8, 32), "GPU": st.integers(0, 8)})


@given(
    nodes=st.lists(node, max_size=5),
    num_engines=st.integers(1, 6),
    per_engine=st.integers(1, 8),
    num_ranks=counts,
)
def test_refused_on_gpus_is_what_does_not_fit(
    nodes: list[dict[str, float]], num_engines: int, per_engine: int, num_ranks: int
) -> None:
    """Ranks take one GPU each, so they fill any gap: engines decide, then the total."""
    plan = plan_placement(gpus("separate", num_engines, per_engine, num_ranks))
    engines_fit = sum(there["GPU"] // per_engine for there in nodes) >= num_engines
    all_fit = total(nodes, "GPU") >= total(plan.bundles, "GPU")
    if engines_fit and all_fit:
        check_fits(plan, nodes)
    else:
        with pytest.raises(ConfigError, match=r"engine\.num_gpus"):
            check_fits(plan, nodes)


def test_more_cores_than_there_are_are_refused() -> None:
    plan = plan_placement(config("separate", 2, 1, engine={"num_cores": 2}))
    check_fits(plan, [{"CPU": 2}, {"CPU": 3}])
    with pytest.raises(ConfigError, match=r"engine\.num_cores"):
        check_fits(plan, [{"CPU": 2}, {"CPU": 2}])


def test_an_engine_does_not_span_nodes() -> None:
    plan = plan_placement(gpus("colocated", 1, 8, 8))
    check_fits(plan, [{"CPU": 8, "GPU": 8}])
    with pytest.raises(ConfigError, match=r"engine\.num_gpus"):
        check_fits(plan, [{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}])


def test_colocated_ranks_are_shown_the_gpus_of_their_engine() -> None:
    pytest.importorskip("ray")
    plan = plan_placement(gpus("colocated", 2, 2, 4))
    reservation = Reservation(plan, group=None)
    # In any order; a successor has its predecessor's place.
    reservation.gpus_of_engines([("engine-1.2", ["6", "7"]), ("engine-0", ["3", "5"])])
    options = [reservation.rank(rank) for rank in range(4)]
    assert [each["gpu"] for each in options] == ["3", "5", "6", "7"]
    assert all(each["num_cpus"] == 0 and "num_gpus" not in each for each in options)
