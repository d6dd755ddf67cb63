"""Pictures of benchmark results: their titles say what was found."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tlt.bench.plot import plot_decisions, plot_replay, plot_running
from tlt.pictures import pyplot


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the titles of figures when they are closed."""
    found: list[str] = []
    close = pyplot.close

    def read(figure: Any) -> None:
        found.append(figure.get_suptitle())
        close(figure)

    monkeypatch.setattr(pyplot, "close", read)
    return found


def result(**seconds: float) -> dict[str, Any]:
    modes = [name.replace("_", ":") for name in seconds]
    return {
        "workload": {"num_requests": 8, "total_tokens": 99, "longest": 30},
        "num_engines": 1,
        "summary": [
            {"mode": mode, "wall_s": {"median": s}}
            for mode, s in zip(modes, seconds.values(), strict=True)
        ],
        "runs": [
            {"mode": mode, "wall_s": s, "curve": [(0, 8), (s, 0)]}
            for mode, s in zip(modes, seconds.values(), strict=True)
        ],
    }


def test_the_picture_of_rollouts_names_the_fastest_mode(tmp_path: Path, titles: list[str]) -> None:
    assert plot_running(result(off=4.0, ngram_2=2.0), tmp_path / "a.png").exists()
    plot_running(result(off=4.0, eagle3_4=5.0), tmp_path / "b.png")
    assert titles == ["ngram:2 is fastest: 2.00x as fast as off", "Nothing is faster than off"]


def test_the_picture_of_decisions_names_the_arm_used_most(
    tmp_path: Path, titles: list[str]
) -> None:
    trace = [(0.0, 8, "off"), (1.0, 4, "eagle3:2"), (2.0, 2, "eagle3:2"), (3.0, 1, "ngram:4")]
    plot_decisions([trace], "adaptive", tmp_path / "a.png")
    assert titles == ["adaptive used 3 of its arms, most of all eagle3:2 (50% of the decisions)"]


def test_the_picture_of_a_replay_names_who_comes_closest(tmp_path: Path, titles: list[str]) -> None:
    reached = {"adaptive": 0.97, "beg_mab": 0.9, "eagle3:2": 0.8, "ngram:4": 0.85, "off": 0.5}
    rows = [
        {"scenario": scenario, "strategy": name, "of_oracle": of, "low": of, "high": of}
        for scenario in ("stationary", "abrupt")
        for name, of in reached.items()
    ]
    plot_replay({"recorded": rows}, tmp_path / "a.png")
    assert titles == ["Closest to the oracle: adaptive (replayed, modelled)"]
