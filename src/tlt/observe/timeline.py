"""A run's timeline: `timeline.json`, Chrome trace events that https://ui.perfetto.dev opens.

The trace has one row for the run's stages, one for every worker, and one for a learner with its own
devices. A graph shows the running requests of every engine. Every moment of an RL step has exactly
one state in each row. The file holds one line per RL step: a resumed run drops the last lines, and
a file that has grown too large loses its oldest ones. The trace format allows a missing last
bracket, so the file is valid after every line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlt.contracts import DRAFTERS, Arm
from tlt.errors import ConfigError
from tlt.spans import STATES, Span, State, covered

MAX_BYTES = 64 * 2**20
LATEST_BYTES = 4 * 2**20
"""Most bytes at the end of a file that are read for its latest RL steps."""
MAX_STEP_SPANS = 4096
"""Most spans of all engines in an RL step; with many engines each gets fewer."""
MIN_ENGINE_SPANS = 8
RUN, LEARNER = "run", "learner"
MAX_DRAFT = 1024
"""Longest draft that a reader believes."""
LARGEST = 1e15
"""Largest count of a span; also its largest time, in units of 100 microseconds."""

Stages = Sequence[tuple[str, float, float]]
"""Name, start and end of the stages of an RL step, in order."""


@dataclass(slots=True)
class StepTimeline:
    """One RL step: the stages of the run, and the states of every worker."""

    step: int
    start_s: float
    end_s: float
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    rows: dict[str, list[Span]] = field(default_factory=dict)


def step_timeline(
    step: int,
    start_s: float,
    end_s: float,
    stages: Stages,
    engines: Mapping[str, Iterable[Span]],
    leases: Mapping[str, Iterable[Span]],
    updates: Iterable[Span] | None = None,
    tools: Mapping[str, Iterable[Span]] | None = None,
) -> StepTimeline:
    """Return the timeline of an RL step, with a state for every moment of every worker.

    `updates` are the spans of a learner with its own devices; None if workers update the policy.
    `tools` are the times in which trajectories of a worker waited for tools.
    """
    whole = _whole(start_s, end_s, stages)
    own, waits = updates is not None, tools or {}
    background = [Span(_state_in(stage, own), begin, end) for stage, begin, end in whole]
    rows = {
        worker: covered(
            start_s, end_s, (spans, leases.get(worker, ()), waits.get(worker, ()), background)
        )
        for worker, spans in engines.items()
    }
    if updates is not None:
        after = [Span("updating", b, e) for stage, b, e in whole if stage == "update"]
        rest = [Span("waiting", start_s, end_s)]
        rows[LEARNER] = covered(start_s, end_s, (updates, after, rest))
    return StepTimeline(step, start_s, end_s, whole, rows)


def _whole(start_s: float, end_s: float, stages: Stages) -> list[tuple[str, float, float]]:
    """Return the stages, with `other` in the gaps between them."""
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
    """Return the most spans that each of `num_engines` engines may report for an RL step."""
    return max(MIN_ENGINE_SPANS, MAX_STEP_SPANS // max(1, num_engines))


# --- the file -------------------------------------------------------------------------------------


class TimelineLog:
    """The only writer of the file."""

    def __init__(self, path: Path, workers: Sequence[str], max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        # A resumed run may have other engines: each keeps the number of its row.
        self._ids = {RUN: 0, LEARNER: 1} | {worker: _row(worker) for worker in workers}
        self._max_bytes = max_bytes

    def rewind(self, step: int) -> float | None:
        """Drop the RL steps after this one; -1 drops all. Return when the last one kept ended."""
        kept: list[str] = []
        end_s: float | None = None
        if self._path.exists():
            text = self._path.read_text(errors="replace")
            header, *lines = text.splitlines(keepends=True) or [""]
            self._ids = {name: row for row, name in _names(header).items()} | self._ids
            names = {row: name for name, row in self._ids.items()}
            for line in lines:
                timeline = _step_of(line, names)
                if timeline is not None and timeline.step <= step:
                    kept.append(line)
                    end_s = timeline.end_s
        self._write(kept)
        return end_s

    def append(self, timeline: StepTimeline) -> None:
        """Write the timeline of an RL step."""
        line = _line(self._events(timeline))
        size = self._path.stat().st_size
        try:
            with self._path.open("a") as file:
                file.write(line)
                new_size = file.tell()
        except OSError:
            os.truncate(self._path, size)  # or the next line would continue this one
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
        return f"[{_line(names)}"

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
    """Yield the running requests of an engine as counter events."""
    last = -1
    for span in spans:
        if round(span.running) != last:
            last = round(span.running)
            yield {
                **{"ph": "C", "name": f"{worker} running", "ts": _us(span.start_s), "pid": 1},
                "args": {"requests": last},
            }


def _line(events: Iterable[dict[str, Any]]) -> str:
    return ",".join(json.dumps(event, separators=(",", ":")) for event in events) + ",\n"


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _row(worker: str) -> int:
    """Return the row of an engine; the rows of the run and the learner come first."""
    return 2 + int(worker.rsplit("-", 1)[-1])


def _names(header: str) -> dict[int, str]:
    """Return the names of the rows; empty if the header cannot be read."""
    try:
        events = json.loads(f"{header.rstrip().rstrip(',')}]")
        named = [e for e in events if e["name"] == "thread_name"]
        return {int(e["tid"]): str(e["args"]["name"]) for e in named}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def read_timeline(
    path: Path, latest: int | None = None, max_bytes: int = LATEST_BYTES
) -> list[StepTimeline]:
    """Return all RL steps of a file but one that is just being written.

    Only the latest ones come from the last `max_bytes` of the file, without damaged lines.
    """
    try:
        with path.open("rb") as file:
            header = file.readline()
            size = os.fstat(file.fileno()).st_size
            start = max(len(header), size - max_bytes) if latest else len(header)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if start > len(header):
        lines = lines[1:]  # its beginning was not read
    names = _names(header.decode(errors="replace"))
    steps = [_step_of(line, names) for line in lines[-latest - 1 if latest else 0 :]]
    if not latest and None in steps[:-1]:  # the last line may be torn
        raise ConfigError(
            f"{path}, line {steps.index(None) + 2} is damaged; remove the file to see the run "
            "without its timeline"
        )
    return [step for step in steps if step is not None][-latest if latest else 0 :]


def _step_of(line: str, names: Mapping[int, str]) -> StepTimeline | None:
    """Return the RL step of a line; None if the line is torn or damaged."""
    if not line.endswith(",\n"):
        return None
    try:
        return _read_step(json.loads(f"[{line.rstrip().rstrip(',')}]"), names)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _read_step(events: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> StepTimeline:
    timeline = StepTimeline(int(events[0]["args"]["step"]), 0.0, 0.0)
    open_events: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["ph"] == "B":
            open_events[event["tid"]] = event
        elif event["ph"] == "E":
            begun = open_events.pop(event["tid"])
            row, start_s, end_s = names[event["tid"]], _seconds(begun), _seconds(event)
            if end_s < start_s:
                raise ValueError("ends before it begins")
            if row == RUN:
                timeline.stages.append((str(begun["name"]), start_s, end_s))
                continue
            timeline.rows.setdefault(row, []).append(_span(begun, start_s, end_s))
    timeline.start_s = timeline.stages[0][1]
    timeline.end_s = timeline.stages[-1][2]
    return timeline


def _seconds(event: Mapping[str, Any]) -> float:
    return _number(event["ts"], 100 * LARGEST) / 1e6


def _span(event: Mapping[str, Any], start_s: float, end_s: float) -> Span:
    """Return the span that an event begins; an error says that no run has written it."""
    args = {k: v for k, v in event.get("args", {}).items() if k != "acceptance length"}
    span = Span(event["name"], start_s, end_s, **args)
    for value in (span.running, span.tokens, span.drafts, span.accepted):
        _number(value, LARGEST)
    arm = Arm.parse(span.arm)
    if arm.drafter not in ("off", *DRAFTERS) or not 0 <= arm.num_draft_tokens <= MAX_DRAFT:
        raise ValueError(span.arm)
    if span.state not in STATES:
        raise ValueError(span.state)
    return span


def _number(value: Any, largest: float) -> float:
    """Return a number from 0 on, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ValueError(value)
    return value


def worker_seconds(timelines: Iterable[StepTimeline]) -> dict[str, dict[str, float]]:
    """Return the seconds of every worker in every state, over all RL steps."""
    total: dict[str, dict[str, float]] = {}
    for timeline in timelines:
        for worker, spans in timeline.rows.items():
            of_worker = total.setdefault(worker, dict.fromkeys(STATES, 0.0))
            for span in spans:
                of_worker[span.state] += span.seconds
    total.pop(LEARNER, None)
    return total
