"""Published runs: the errors that answers name, and which run is the nearest."""

import json
from pathlib import Path

import pytest

from tlt.simulate.published import CASES, Case, nearest

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "published.json"


def test_the_cases_are_those_of_the_committed_result() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    found = [row for row in rows if row["figure"] == "end_to_end"]
    names = ("run", "model", "gpus_per_engine", "nodes", "published", "simulated")
    assert [Case(*(row[name] for name in names)) for row in found] == list(CASES)
    assert [case.error for case in CASES] == pytest.approx(
        [row["off_by"] for row in found], abs=1e-3
    )


@pytest.mark.parametrize(
    ("scenario", "runs"),
    [
        (("qwen2.5-7b", 1, 1), {("TLT paper", 1, 1), ("SkyRL", 1, 1)}),
        (("qwen3-8b", 1, 2), {("TLT paper", 1, 2)}),
        (("qwen2.5-7b", 4, 16), {("TLT paper", 4, 8)}),
        (("qwen3-32b", 8, 1), {("TLT paper", 4, 4)}),
        (("llama-3-70b", 4, 8), {("TLT paper", 4, 8)}),
    ],
)
def test_nearest_by_size_then_engine_then_nodes(
    scenario: tuple[str, int, int], runs: set[tuple[str, int, int]]
) -> None:
    found = nearest(*scenario)
    assert {(case.run, case.gpus_per_engine, case.nodes) for case in found} == runs
    large = scenario[0] in ("qwen3-32b", "llama-3-70b")
    assert all(("32b" in case.model) == large for case in found)


def test_a_case_says_by_how_much_the_simulator_is_off() -> None:
    said = str(Case("SkyRL", "qwen3-8b", 1, 1, 1.6, 2.4))
    for part in ("SkyRL", "1 node,", "1.60x published", "2.40x modelled", "+50%"):
        assert part in said
