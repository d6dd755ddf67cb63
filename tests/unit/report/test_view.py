"""Reports of runs that are written here, by the same writers as in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up_folder

from tlt.colours import INK
from tlt.errors import ConfigError
from tlt.report.charts import charts_of, comparison
from tlt.report.findings import findings
from tlt.report.page import as_html, as_json, pictures
from tlt.report.svg import Box, Line
from tlt.report.view import describe, look_at, tail_share

Run = Callable[..., Path]

EVEN = [100] * 16


@pytest.fixture
def make(tmp_path: Path) -> Run:
    def make(name: str = "run", **changed: Any) -> Path:
        return made_up_folder(tmp_path / name, **changed)

    return make


# --- numbers --------------------------------------------------------------------------------------


def test_what_a_report_says(make: Run) -> None:
    view = look_at(make())
    found = describe(view)
    assert found["num_steps"] == 4
    assert found["lengths"]["longest_over_median"] == 15
    assert found["tail_share"] == pytest.approx(0.8)
    # engine-0 generates all the time, engine-1 the first two of ten seconds.
    assert found["workers"]["engine-1"]["idle"] == pytest.approx(4 * 8)
    assert found["reclaimed"] == {"idle_s": pytest.approx(32), "training_s": 0, "share": 0}
    total = sum(found["workers"]["engine-0"].values())
    assert total == pytest.approx(found["total"]["time/step_s"], rel=1e-6)
    used = describe(look_at(make("tlt", config={"tlt": {"enabled": True}})))["reclaimed"]
    assert used["training_s"] == pytest.approx(20)
    assert used["share"] == pytest.approx(20 / 32)


def test_what_spoils_training_comes_before_what_slows_it_down(make: Run) -> None:
    """Also in the first step, which other findings leave out."""
    view = look_at(make(time__reward_wait_s=9.0, recheck__samples=2.0))
    view.records[0] |= {"learner/gap_alarms": 1, "rollout/policy_mismatches": 2}
    view.records[1] |= {"recheck/faults": 1, "recheck/shortfall_max": 1.5}
    view.records[3] |= {"reward/fault_share": 0.98, "learner/skipped_updates": 1}
    found = findings(view)
    assert [f.kind for f in found[:6]] == [
        *("skipped_updates", "reward_faults", "gap_alarm", "recheck_fault"),
        *("policy_mismatch", "reward_bound"),
    ]
    assert "RL step 1," in found[2].says
    assert "1 of 8 rechecks" in found[3].says
    trained = replace(view, config={"alarm": {"then": "warn"}})
    assert findings(trained)[2].says != found[2].says


def test_a_folder_without_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        look_at(tmp_path)


# --- the page -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Balanced tags, and nothing that would need a network or scripts."""

    VOID = frozenset({"meta", "rect", "line", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any((v or "").startswith("http") for k, v in attrs if k != "xmlns")
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone(make: Run) -> None:
    views = [look_at(make("off")), look_at(make("t<l>t", config={"tlt": {"enabled": True}}))]
    html = as_html(views)
    page = Page()
    page.feed(html)
    assert page.open == []
    text = " ".join(page.text)
    assert text.startswith("No clear difference in speed with TLT")
    assert "t<l>t compared with off." in text
    assert "nan" not in html.lower().replace("finance", "")
    assert "@import" not in html


def test_the_page_and_every_picture_say_what_was_emulated(make: Run) -> None:
    config = {"emulate": {"hardware": "h100", "dilation": 8.0}, "pool": {"num_engines": 8}}
    views = [look_at(make("off", config=config)), look_at(make("tlt", config=config))]
    label = "emulated: 8 H100s, qwen2.5-7b"
    assert as_html(views).index(f"Time was {label}.") < as_html(views).index("what holds the run")
    assert all(label in svg for svg in pictures(views).values())
    assert comparison(views)[0].y.label == "seconds (emulated)"
    assert "seconds since the rollout began (emulated)" in as_html(views)
    assert json.loads(as_json(views))["runs"][0]["emulated"] == label
    plain = [look_at(make("plain"))]
    assert "emulated" not in as_html(plain)


def with_samples(run: Path, texts: str) -> Path:
    """Write one sample for each letter to the run's folder, in this order."""
    (run / "samples").mkdir()
    lines = "".join(f"{letter}\n" for letter in texts)
    (run / "samples" / "step-000001.jsonl").write_text(lines)
    return run


def test_the_page_of_two_runs_opens_with_the_gain_and_the_identical_samples(make: Run) -> None:
    forced = {"debug": {"forced_lengths": {"median": 60}}}
    off = with_samples(make("off", config=forced), "abcd")
    tlt = make("tlt", time__rollout_s=5.0, config=forced | {"tlt": {"enabled": True}})
    views = [look_at(off), look_at(with_samples(tlt, "dabx"))]
    html = as_html(views).partition("<body>")[2]
    facts = [">1.57x", "8.7 s instead of 13.7 s", "2.00x", "rollouts (", "3 of 4", "identical"]
    order = ["<h1>RL steps are 1.57x faster with TLT</h1>", *facts, "lengths were forced", "<svg"]
    places = [html.index(text) for text in order]
    assert places == sorted(places)
    assert "per token, as lengths differ" not in html
    assert html.count("Reward: identical in both runs") == 2  # heading and label of the picture
    assert "the same lengths as in off" in html
    assert "forced" not in as_html([look_at(make("plain"))])
    views[1].records[2] |= {"reward/mean": 0.9, "rollout/output_tokens": 900.0}
    html = as_html(views)
    assert "per token, as lengths differ" in html
    assert "0.400 / 0.400" in html
    assert "Reward: identical" not in html
    slower = look_at(make("slower", time__rollout_s=20.0))
    assert "<h1>RL steps are slower with slower: 0.58x</h1>" in as_html([views[0], slower])
    three = as_html([*views, slower])
    assert "Speed-up over off" in three
    assert "none kept" in three


def test_the_page_shows_findings_and_leads_to_the_timelines(make: Run) -> None:
    runs = [make("off", time__reward_wait_s=9.0), make("a b")]
    html = as_html([look_at(run) for run in runs], runs[1] / "report.html")
    assert html.index("off: what holds the run back") < html.index(
        "Where the seconds of an RL step go"
    )
    assert findings(look_at(runs[0]))[0].says[:40] in html
    assert html.count('class="finding"') == sum(len(findings(look_at(run))) for run in runs)
    assert 'href="../off/timeline.json"' in html
    assert 'href="timeline.json"' in html
    elsewhere = as_html([look_at(runs[1])], runs[0] / "page.html")
    assert 'href="../a%20b/timeline.json"' in elsewhere
    assert "What holds the run back" in elsewhere


def test_the_latest_steps_alone(make: Run) -> None:
    folder = make(steps=6)
    view = look_at(folder, latest=2)
    assert [record["step"] for record in view.records] == [5, 6]
    assert [timeline.step for timeline in view.timelines] == [5, 6]
    assert len(view.lengths) == 2 * 16
    whole = look_at(folder)
    assert whole.timelines[-2:] == view.timelines


def test_json_says_what_the_page_says(make: Run) -> None:
    views = [look_at(make("off")), look_at(make("tlt", time__rollout_s=5.0))]
    found = json.loads(as_json(views))
    assert [run["name"] for run in found["runs"]] == ["off", "tlt"]
    assert found["comparisons"][0]["rollout"]["median"] == pytest.approx(2.0)
    assert found["runs"][0]["findings"]


# --- charts ---------------------------------------------------------------------------------------


def test_charts_hold_what_was_measured(make: Run) -> None:
    view = look_at(make())
    (charts,) = charts_of([view])
    curve, *strips = charts["rollout"].shapes
    assert isinstance(curve, Line)
    assert [(round(at, 3), count) for at, count in curve.points] == [(0, 32), (2, 1), (10, 1)]
    assert len(strips) == 3  # two arms of one engine, one of the other
    boxes = [shape for shape in charts["stages"].shapes if isinstance(shape, Box)]
    assert max(box.y[1] for box in boxes) == pytest.approx(view.records[0]["time/step_s"])
    assert list(charts["stages"].legend) == ["rollout", "reward wait", "update", "sync", "other"]
    assert list(charts["workers"].y.names.values()) == ["engine-0", "engine-1"]
    assert charts["lengths"].marks == {40: "median 40", 600: "95%: 600"}
    assert sum(box.y[1] for box in charts["lengths"].shapes if isinstance(box, Box)) == 4 * 16
    (reward,) = charts["reward"].shapes
    assert isinstance(reward, Line)
    assert [y for _, y in reward.points] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_runs_that_are_compared_have_the_same_axes(make: Run) -> None:
    views = [look_at(make("off")), look_at(make("tlt", time__rollout_s=5.0, steps=6))]
    slow, fast = charts_of(views)
    for name, chart in slow.items():
        assert fast[name].x == chart.x, name
        assert fast[name].y == chart.y, name
    assert slow["rollout"].x.high == pytest.approx(10)
    seconds, reward = comparison(views)
    assert [len(line.points) for line in seconds.shapes if isinstance(line, Line)] == [4, 6]
    assert list(reward.legend) == ["both runs"]
    assert [len(line.points) for line in reward.shapes if isinstance(line, Line)] == [6]
    views[1].records[0]["reward/mean"] = 0.7
    assert list(comparison(views)[1].legend) == ["off", "tlt"]
    files = pictures(views)
    assert set(files) == {f"{run}-{name}.svg" for run in ("off", "tlt") for name in slow}
    assert all(f'style="color:{INK}"' in text for text in files.values())


def test_a_chart_without_data_says_why(make: Run) -> None:
    folder = make("bare")
    (folder / "timeline.json").unlink()
    (folder / "lengths.jsonl").unlink()
    assert "metrics.timeline = true" in as_html([look_at(folder)])
    views = [look_at(folder), look_at(make("whole"))]
    bare, whole = charts_of(views)
    assert not bare["rollout"].shapes
    assert "metrics.timeline = true" in bare["rollout"].note
    assert whole["rollout"].x.high == pytest.approx(10)
    assert "bare-rollout.svg" not in pictures(views)


# --- what holds a run back ------------------------------------------------------------------------

FAST = (("off", 4.0, 1, 100, 0), ("eagle3:3", 4.0, 1, 240, 160))
SLOW = (("off", 4.0, 1, 100, 0), ("eagle3:3", 4.0, 1, 80, 50))
WEAK = (("eagle3:3", 9.0, 1, 500, 60),)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("no_speculation", {}),
        ("reward_bound", {"time__reward_wait_s": 8.0}),
        ("learner_bound", {"time__update_s": 30.0}),
        ("no_tail", {"lengths": EVEN}),
        ("weak_drafter", {"arms": WEAK, "config": {"tlt": {"enabled": True}}}),
        ("speculation_does_not_pay", {"arms": SLOW, "config": {"tlt": {"enabled": True}}}),
        (
            "too_little_room",
            {"response__truncated_share": 0.6, "config": {"tlt": {"enabled": True}}},
        ),
        ("sync_bound", {"time__sync_s": 9.0}),
        ("late", {"emulate__late_s_share": 0.03}),
        ("eval_bound", {"time__eval_s": 20.0}),
        ("checkpoint_bound", {"time__checkpoint_s": 12.0}),
        ("nothing", {"arms": FAST, "config": {"tlt": {"enabled": True}}}),
    ],
)
def test_the_first_finding_names_what_is_wrong(make: Run, kind: str, options: Any) -> None:
    found = findings(look_at(make(**options)))
    assert found[0].kind == kind, found
    assert found[0].says
    assert found[0].change


def test_lost_engines_and_equal_rewards_are_told(make: Run) -> None:
    options = {"rollout__engine_restarts": 1.0, "reward__groups_with_signal_share": 0.0}
    kinds = {f.kind for f in findings(look_at(make(**options)))}
    assert {"restarts", "no_signal"} <= kinds
    forced = {"debug": {"forced_lengths": {"median": 1}}}
    view = look_at(make("forced", response__truncated_share=1.0, config=forced))
    assert not {"too_little_room", "no_signal"} & {f.kind for f in findings(view)}


def test_the_tail_begins_after_the_most_requests_ran(make: Run) -> None:
    view = look_at(make(arms=(("off", 1.0, 1, 10, 0), ("off", 9.0, 16, 900, 0))))
    assert tail_share(view) == 0
