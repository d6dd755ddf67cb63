"""A run's timeline: `timeline.json`, Chrome trace events that https://ui.perfetto.dev opens.

One row for the run's stages, one for every worker, one for a learner with devices of its own; a
graph of running requests for every engine. Every moment of a step has exactly one state in each
row. The file holds one line a step, so that steps can be dropped from either end: those that a
resumed run does again, and the oldest ones when it has grown too large. A trace may lack its last
bracket, so the file is complete after every line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlt.spans import STATES, Span, State, covered

MAX_BYTES = 64 * 2**20
MAX_STEP_SPANS = 4096
"""Of all engines together; with many engines each gets fewer."""
MIN_ENGINE_SPANS = 8
RUN, LEARNER = "run", "learner"

Stages = Sequence[tuple[str, float, float]]
"""Name, start and end of what the run did, one after the other."""


@dataclass(slots=True)
class StepTimeline:
    """One step: the run's stages, and what every worker did meanwhile."""

    step: int
    start_s: float
    end_s: float
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    rows: dict[str, list[Span]] = field(default_factory=dict)

    def seconds(self, state: State) -> dict[str, float]:
        """Of every worker in this state."""
        return {
            worker: sum(span.seconds for span in spans if span.state == state)
            for worker, spans in self.rows.items()
            if worker != LEARNER
        }


def step_timeline(
    step: int,
    start_s: float,
    end_s: float,
    stages: Stages,
    engines: Mapping[str, Iterable[Span]],
    leases: Mapping[str, Iterable[Span]],
    updates: Iterable[Span] | None = None,
) -> StepTimeline:
    """Every moment of a step, for every worker.

    `updates` are those of a learner with devices of its own; without, workers update the policy.
    """
    whole = _whole(start_s, end_s, stages)
    own = updates is not None
    background = [Span(_state_in(stage, own), begin, end) for stage, begin, end in whole]
    rows = {
        worker: covered(start_s, end_s, (spans, leases.get(worker, ()), background))
        for worker, spans in engines.items()
    }
    if updates is not None:
        after = [Span("updating", b, e) for stage, b, e in whole if stage == "update"]
        rest = [Span("waiting", start_s, end_s)]
        rows[LEARNER] = covered(start_s, end_s, (updates, after, rest))
    return StepTimeline(step, start_s, end_s, whole, rows)


def _whole(start_s: float, end_s: float, stages: Stages) -> list[tuple[str, float, float]]:
    """The stages, and `other` between them."""
    whole: list[tuple[str, float, float]] = []
    at_s = start_s
    for stage, begin_s, stage_end_s in [*stages, ("", end_s, end_s)]:
        begin_s, stage_end_s = max(at_s, begin_s), min(end_s, stage_end_s)
        if begin_s > at_s:
            whole.append(("other", at_s, begin_s))
        if stage_end_s > begin_s:
            whole.append((stage, begin_s, stage_end_s))
        at_s = max(at_s, begin_s, stage_end_s)
    return whole


def _state_in(stage: str, learner_has_own_devices: bool) -> State:
    if stage in ("rollout", "eval"):
        return "idle"
    return "updating" if stage == "update" and not learner_has_own_devices else "waiting"


def max_engine_spans(num_engines: int) -> int:
    return max(MIN_ENGINE_SPANS, MAX_STEP_SPANS // max(1, num_engines))


# --- the file -------------------------------------------------------------------------------------


class TimelineLog:
    """The one writer of the file."""

    def __init__(self, path: Path, workers: Sequence[str], max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        # A resumed run may have other engines: a row keeps its number, whoever else is there.
        self._ids = {RUN: 0, LEARNER: 1} | {worker: _row(worker) for worker in workers}
        self._max_bytes = max_bytes

    def rewind(self, step: int) -> float | None:
        """Drop what comes after this step; -1 drops all. When the last step kept has ended."""
        kept: list[str] = []
        last: list[dict[str, Any]] = []
        if self._path.exists():
            header, *lines = self._path.read_text().splitlines(keepends=True) or [""]
            self._ids = {name: row for row, name in _names(header).items()} | self._ids
            for line in lines:
                events = _events_of(line)
                if events is not None and int(events[0]["args"]["step"]) <= step:
                    kept.append(line)
                    last = events
        self._write(kept)
        return _read_step(last, _names(self._header())).end_s if last else None

    def append(self, timeline: StepTimeline) -> None:
        line = ",".join(json.dumps(e, separators=(",", ":")) for e in self._events(timeline))
        size = self._path.stat().st_size
        try:
            with self._path.open("a") as file:
                file.write(f"{line},\n")
                new_size = file.tell()
        except OSError:
            os.truncate(self._path, size)  # or the next line would go on in the middle of this one
            raise
        if new_size > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        kept: list[str] = []
        size = 0
        for line in reversed(self._path.read_text().splitlines(keepends=True)[1:]):
            size += len(line)
            if kept and size > self._max_bytes // 2:
                break
            kept.append(line)
        self._write(kept[::-1])

    def _write(self, lines: Iterable[str]) -> None:
        hidden = self._path.with_name(f".{self._path.name}")
        hidden.write_text(f"{self._header()}{''.join(lines)}")
        hidden.rename(self._path)

    def _header(self) -> str:
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": kind, "pid": 1, "tid": number, "args": args}
            for name, number in self._ids.items()
            for kind, args in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": number}),
            )
        ]
        names.append({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "TLT"}})
        return f"[{','.join(json.dumps(event, separators=(',', ':')) for event in names)},\n"

    def _events(self, timeline: StepTimeline) -> Iterable[dict[str, Any]]:
        place = {"pid": 1, "tid": self._ids[RUN]}
        for stage, start_s, end_s in timeline.stages:
            args = {"step": timeline.step}
            yield {"ph": "B", "name": stage, "ts": _us(start_s), **place, "args": args}
            yield {"ph": "E", "ts": _us(end_s), **place}
        for worker, spans in timeline.rows.items():
            place = {"pid": 1, "tid": self._ids[worker]}
            for span in spans:
                counts: dict[str, Any] = {
                    name: round(value, 2) if isinstance(value, float) else value
                    for name in ("running", "arm", "mixed", "tokens", "drafts", "accepted")
                    if (value := getattr(span, name))
                }
                if span.drafts:
                    counts["acceptance length"] = round(1 + span.accepted / span.drafts, 2)
                yield {
                    **{"ph": "B", "name": span.state, "ts": _us(span.start_s), **place},
                    **({"args": counts} if counts else {}),
                }
                yield {"ph": "E", "ts": _us(span.end_s), **place}
            yield from _graph(worker, spans)


def _graph(worker: str, spans: Sequence[Span]) -> Iterable[dict[str, Any]]:
    """The running requests of an engine."""
    last = -1
    for span in spans:
        if round(span.running) != last:
            last = round(span.running)
            yield {
                **{"ph": "C", "name": f"{worker} running", "ts": _us(span.start_s), "pid": 1},
                "args": {"requests": last},
            }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _row(worker: str) -> int:
    """Of an engine; those of the run and the learner come first."""
    return 2 + int(worker.rsplit("-", 1)[-1])


def _names(header: str) -> dict[int, str]:
    """Rows and their names; none of a header that cannot be read."""
    try:
        events = json.loads(f"{header.rstrip().rstrip(',')}]")
    except ValueError:
        return {}
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def _events_of(line: str) -> list[dict[str, Any]] | None:
    """Those of a step, which begin with its first stage; None of a line that is torn."""
    if not line.endswith(",\n"):
        return None
    try:
        events: list[dict[str, Any]] = json.loads(f"[{line.rstrip().rstrip(',')}]")
        int(events[0]["args"]["step"])
    except (ValueError, KeyError, IndexError):
        return None
    return events


def read_timeline(path: Path) -> list[StepTimeline]:
    """All steps of a file; one that is just being written is left out."""
    if not path.exists():
        return []
    header, *lines = path.read_text().splitlines(keepends=True) or [""]
    names = _names(header)
    steps = [events for line in lines if (events := _events_of(line)) is not None]
    return [_read_step(events, names) for events in steps]


def _read_step(events: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> StepTimeline:
    timeline = StepTimeline(int(events[0]["args"]["step"]), 0.0, 0.0)
    open_events: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["ph"] == "B":
            open_events[event["tid"]] = event
        elif event["ph"] == "E":
            begun = open_events.pop(event["tid"])
            row, start_s, end_s = names[event["tid"]], begun["ts"] / 1e6, event["ts"] / 1e6
            if row == RUN:
                timeline.stages.append((begun["name"], start_s, end_s))
                continue
            args = {k: v for k, v in begun.get("args", {}).items() if k != "acceptance length"}
            timeline.rows.setdefault(row, []).append(Span(begun["name"], start_s, end_s, **args))
    timeline.start_s = timeline.stages[0][1]
    timeline.end_s = timeline.stages[-1][2]
    return timeline


def worker_seconds(timelines: Iterable[StepTimeline]) -> dict[str, dict[str, float]]:
    """Seconds of every worker in every state, over all steps."""
    total: dict[str, dict[str, float]] = {}
    for timeline in timelines:
        for state in STATES:
            for worker, seconds in timeline.seconds(state).items():
                of_worker = total.setdefault(worker, dict.fromkeys(STATES, 0.0))
                of_worker[state] += seconds
    return total
