"""Spans, and the timeline made of them: every moment has exactly one state."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.observe.timeline import (
    LEARNER,
    StepTimeline,
    TimelineLog,
    max_engine_spans,
    read_timeline,
    step_timeline,
    worker_seconds,
)
from tlt.spans import MAX_SPANS, Span, SpanLog, covered
from trace_events import check_trace


def generating(start_s: float, end_s: float, running: float = 4.0, arm: str = "off") -> Span:
    return Span("generating", start_s, end_s, running, arm, tokens=4, drafts=2, accepted=1)


# --- spans ----------------------------------------------------------------------------------------


def test_steps_alike_become_one_span() -> None:
    log = SpanLog()
    for step in range(100):
        log.add(generating(step * 0.1, step * 0.1 + 0.099))
    (span,) = log.take()
    assert span.start_s == 0.0
    assert span.end_s == pytest.approx(9.999)
    assert (span.tokens, span.drafts, span.accepted) == (400, 200, 100)


@pytest.mark.parametrize(
    "second",
    [generating(0.1, 0.2, running=3), generating(0.1, 0.2, arm="eagle3:3"), generating(0.5, 0.6)],
    ids=["another load", "another arm", "a pause between them"],
)
def test_steps_not_alike_stay_apart(second: Span) -> None:
    log = SpanLog()
    log.add(generating(0.0, 0.1))
    log.add(second)
    assert len(log.take()) == 2
    assert log.take() == []


def test_a_long_log_stays_short_and_loses_nothing() -> None:
    log = SpanLog()
    for step in range(20_000):
        log.add(generating(step * 0.02, step * 0.02 + 0.02, running=step % 7, arm=f"a{step % 3}"))
    spans = log.take()
    assert MAX_SPANS / 4 < len(spans) <= MAX_SPANS
    assert sum(span.tokens for span in spans) == 4 * 20_000
    assert sum(span.seconds for span in spans) == pytest.approx(400)
    mean = sum(span.running * span.seconds for span in spans) / 400
    assert mean == pytest.approx(3.0, abs=0.01)


def test_an_engine_gives_as_few_spans_as_it_is_asked_for() -> None:
    log = SpanLog()
    for step in range(200):
        log.add(generating(step * 0.1, step * 0.1 + 0.1, running=step % 2))
    assert len(log.take(max_spans=10)) <= 10
    assert max_engine_spans(1) > max_engine_spans(64) > max_engine_spans(4096) >= 8


moments = st.floats(0, 100, allow_nan=False)
pieces = st.lists(st.tuples(moments, moments).map(sorted), max_size=8)


@given(st.lists(pieces, max_size=3), moments, moments)
def test_every_moment_has_one_state(layers: list[list[list[float]]], a: float, b: float) -> None:
    start_s, end_s = sorted((a, b))
    states = ("generating", "training", "swapping")
    spans = [
        [Span(state, low, high, tokens=4) for low, high in layer]  # type: ignore[arg-type]
        for state, layer in zip(states, layers, strict=False)
    ]
    found = covered(start_s, end_s, [*spans, [Span("idle", start_s, end_s)]])
    at_s = start_s
    for span in found:
        assert span.start_s == at_s
        assert span.end_s > span.start_s
        at_s = span.end_s
    assert at_s == end_s
    total = sum(span.tokens for layer in spans for span in layer)
    assert sum(span.tokens for span in found) <= total  # not doubled where a span is cut
    # The first layer is hidden by nothing.
    if layers:
        inside = [(max(lo, start_s), min(hi, end_s)) for lo, hi in layers[0]]
        for low, high in inside:
            middle = (low + high) / 2
            if low < middle < high:
                state = next(s.state for s in found if s.start_s <= middle < s.end_s)
                assert state == "generating"


# --- a step ---------------------------------------------------------------------------------------

STAGES = [("rollout", 0.5, 10.0), ("update", 10.1, 15.0), ("sync", 15.0, 16.0)]


def a_step(step: int = 1, at_s: float = 0.0, own_learner: bool = False) -> StepTimeline:
    stages = [(name, at_s + a, at_s + b) for name, a, b in STAGES]
    return step_timeline(
        step,
        at_s,
        at_s + 16.0,
        stages,
        {
            "engine-0": [
                generating(at_s + 0.6, at_s + 10.0),
                Span("swapping", at_s + 15, at_s + 15.5),
            ],
            "engine-1": [generating(at_s + 0.6, at_s + 4.0)],
        },
        {"engine-1": [Span("training", at_s + 4.5, at_s + 9.9)]},
        [Span("updating", at_s + 5, at_s + 6)] if own_learner else None,
    )


def test_who_does_what_in_a_step() -> None:
    rows = a_step().rows
    assert [s.state for s in rows["engine-0"]] == [
        "waiting", "idle", "generating", "waiting", "updating", "swapping", "waiting",
    ]  # fmt: skip
    assert [s.state for s in rows["engine-1"]] == [
        "waiting", "idle", "generating", "idle", "training", "idle", "waiting", "updating",
        "waiting",
    ]  # fmt: skip
    assert worker_seconds([a_step()])["engine-1"]["training"] == pytest.approx(5.4)


def test_waits_for_tools_show_where_nothing_else_happens() -> None:
    """An engine that generates or trains meanwhile loses no time to tools."""
    step = step_timeline(
        1,
        0.0,
        16.0,
        STAGES,
        {"engine-0": [generating(0.6, 4.0), generating(6.0, 10.0)], "engine-1": []},
        {"engine-0": [Span("training", 4.5, 5.0)]},
        tools={"engine-0": [Span("tools", 1.0, 5.5)]},
    )
    rows = [(s.state, s.start_s, s.end_s) for s in step.rows["engine-0"] if 3 < s.end_s <= 10]
    assert rows == [
        *(("generating", 0.6, 4.0), ("tools", 4.0, 4.5), ("training", 4.5, 5.0)),
        *(("tools", 5.0, 5.5), ("idle", 5.5, 6.0), ("generating", 6.0, 10.0)),
    ]
    assert worker_seconds([step])["engine-0"]["tools"] == pytest.approx(1.0)
    assert worker_seconds([step])["engine-1"]["tools"] == 0


def test_workers_wait_for_a_learner_with_devices_of_its_own() -> None:
    rows = a_step(own_learner=True).rows
    assert not any(s.state == "updating" for s in rows["engine-0"])
    assert [s.state for s in rows[LEARNER]] == [
        "waiting", "updating", "waiting", "updating", "waiting",
    ]  # fmt: skip


# --- the file -------------------------------------------------------------------------------------


def write(path: Path, *steps: StepTimeline, **options: int) -> TimelineLog:
    log = TimelineLog(path, ["engine-0", "engine-1"], **options)
    log.rewind(-1)
    for step in steps:
        log.append(step)
    return log


def test_the_file_is_a_trace_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    steps = [a_step(1, own_learner=True), a_step(2, 16.0, own_learner=True)]
    write(path, *steps)
    seconds = check_trace(path)
    found = read_timeline(path)
    assert [step.step for step in found] == [1, 2]
    assert found[1].rows["engine-0"] == steps[1].rows["engine-0"]
    for worker, of in worker_seconds(found).items():
        assert sum(of.values()) == pytest.approx(32.0)
        for state, value in of.items():
            assert value == pytest.approx(seconds[worker].get(state, 0.0), abs=1e-5)


def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    log = write(path, a_step(1), a_step(2, 16.0), a_step(3, 32.0))
    path.write_text(path.read_text() + '[{"torn')
    log.rewind(2)
    assert [step.step for step in read_timeline(path)] == [1, 2]
    log.append(a_step(3, 40.0))
    assert [step.step for step in read_timeline(path)] == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "[" * 5000, "[\n3,\n{},\n"])
def test_a_resumed_run_outlives_a_damaged_timeline(tmp_path: Path, content: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(content)
    log = TimelineLog(path, ["engine-0", "engine-1"])
    assert log.rewind(2) is None
    log.append(a_step(3, 40.0))
    assert [step.step for step in read_timeline(path)] == [3]


def test_a_long_run_keeps_its_latest_steps(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write(path, *(a_step(n, 16.0 * n) for n in range(1, 200)), max_bytes=50_000)
    assert path.stat().st_size <= 60_000
    steps = [step.step for step in read_timeline(path)]
    assert steps[-1] == 199
    assert steps == list(range(steps[0], 200))
    assert len(steps) > 5
    check_trace(path)
    whole = read_timeline(path)
    assert read_timeline(path, 3) == whole[-3:]
    assert read_timeline(path, 300) == whole
    size = len(path.read_text().splitlines()[-1])
    assert read_timeline(path, 100, max_bytes=int(2.5 * size)) == whole[-2:]
    with path.open("a") as file:
        file.write('{"ph": "B"')  # just being written
    assert read_timeline(path, 3) == whole[-3:]
