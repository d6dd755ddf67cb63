"""Response lengths, metrics of a rollout, and the names of modes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tlt.bench import charts
from tlt.bench.metrics import measure
from tlt.bench.rollout import Mode, Plan, requests, summarize
from tlt.bench.workload import read_lengths
from tlt.config.rollout import EngineConfig
from tlt.contracts import EngineStats, Sample
from tlt.errors import ConfigError


def sample(index: int, engine: str, start: float, end: float, tokens: int = 10) -> Sample:
    return Sample(str(index), (0,) * tokens, (), "length", engine, 0, 0.0, end - start, 100 + end)


def test_lengths_from_files(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("[3, 4]")
    assert read_lengths(path) == [3, 4]
    path.write_text("5\n6\n")
    assert read_lengths(path) == [5, 6]


@pytest.mark.parametrize("content", ["[0]", "many", "[1", "[[1]]", "[1e999]", "\xff", "[" * 5000])
def test_files_without_lengths_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"lengths.*e\.g\. \[60"):
        read_lengths(path)
    with pytest.raises(ConfigError, match="nowhere"):
        read_lengths(tmp_path / "nowhere")


def test_natural_responses_are_the_same_in_all_modes() -> None:
    """Modes of one repeat share the seeds; other requests and repeats have their own."""
    engine = EngineConfig(model="m")
    natural = Plan(engine, 1, (), 1, (9, 9), "natural", ((1, 2), (3,)), 1.0, 1.0)
    of = partial(requests, natural, [9, 9])
    off, drafted, again = of(0, "off"), of(0, "ngram:4"), of(1, "off")
    assert [each.sampling for each in off] == [each.sampling for each in drafted]
    assert len({each.sampling.seed for each in off + again}) == 4
    assert not any(each.sampling.ignore_eos for each in off)
    (forced,) = requests(replace(natural, length_source="file"), [9], 0, "off")
    assert forced.sampling.ignore_eos


def test_metrics_of_a_known_rollout() -> None:
    # 16 samples: 14 end by second 4, two run on engine a until 10.
    samples = [sample(i, "b" if i % 2 else "a", 0.0, 4.0) for i in range(14)]
    samples += [sample(14, "a", 0.0, 8.0), sample(15, "a", 5.0, 10.0)]
    before = [EngineStats("a", drafts=1, accepted_tokens=1), EngineStats("b")]
    after = [EngineStats("a", drafts=5, accepted_tokens=7), EngineStats("b")]
    metrics = measure(samples, 100.0, before, after)
    assert metrics["wall_s"] == pytest.approx(10.0)
    assert metrics["tokens_per_s"] == pytest.approx(16.0)
    assert metrics["acceptance_length"] == pytest.approx(2.5)
    assert metrics["tail_share"] == pytest.approx(0.6)
    assert metrics["idle_s"] == pytest.approx({"a": 0.0, "b": 6.0})
    assert (metrics["curve"][0], metrics["curve"][-1][1]) == ((0.0, 16), 0)


def test_speeds_are_compared_within_a_repeat() -> None:
    def run(mode: str, repeat: int, speed: float) -> dict[str, Any]:
        same = {"wall_s": 1.0, "acceptance_length": 1.0, "tail_share": 0.5, "idle_s": {"a": 2.0}}
        return {"mode": mode, "repeat": repeat, "tokens_per_s": speed, **same}

    modes = [Mode.parse(name, has_drafter=False) for name in ("off", "ngram:4")]
    runs = [run("off", 0, 10.0), run("ngram:4", 0, 20.0), run("off", 1, 5.0)]
    _, row = summarize(modes, [*runs, run("ngram:4", 1, 15.0)])
    assert row["speed_vs_first"] == {"median": 2.5, "low": 2.0, "high": 3.0}
    assert row["idle_s_per_engine"]["median"] == 2.0


def test_modes() -> None:
    assert Mode.parse("off", has_drafter=True).strategy == {"kind": "off"}
    setups = {"off": "off", "ngram:4": "ngram", "tail:4@8": "eagle3", "adaptive": "eagle3"}
    assert {name: Mode.parse(name, has_drafter=True).setup for name in setups} == setups
    assert Mode.parse("beg_mab", has_drafter=False).setup == "ngram"
    assert Mode.parse("tail:4@8", has_drafter=True).strategy["schedule"] == [[8, 4]]
    for wrong in ("eagle3", "eagle3:x", "medusa:4", "tail:4", "off:2"):
        with pytest.raises(ConfigError, match=r"e\.g\. eagle3:2"):
            Mode.parse(wrong, has_drafter=True)


def result(**seconds: float) -> dict[str, Any]:
    modes = {name.replace("_", ":"): of for name, of in seconds.items()}
    return {
        "workload": {"num_requests": 8, "total_tokens": 99},
        "num_engines": 1,
        "summary": [{"mode": mode, "wall_s": {"median": s}} for mode, s in modes.items()],
        "runs": [{"mode": m, "wall_s": s, "curve": [(0, 8), (s, 0)]} for m, s in modes.items()],
    }


def test_the_pictures_name_the_fastest_mode_and_the_favourite_arm() -> None:
    assert "ngram:2 is fastest: 2.00x" in charts.running(result(off=4.0, ngram_2=2.0))
    assert "Nothing is faster than off" in charts.running(result(off=4.0, eagle3_4=5.0))
    trace = [(0.0, 8, "off"), (1.0, 4, "eagle3:2"), (2.0, 2, "eagle3:2"), (3.0, 1, "ngram:4")]
    shown = charts.decisions([trace, []], "beg_mab")
    assert "BEG-MAB used 3 arms, most of all eagle3:2 (50% of the decisions)" in shown
    assert "eagle3:2, 2 engine steps" in shown
