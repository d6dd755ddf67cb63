"""Checks of a timeline by the trace-event format alone, without the code that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_trace(path: Path, holes: int = 0) -> dict[str, dict[str, float]]:
    """Check that spans are closed and never overlap, and return the seconds of each row and state.

    Each row may have up to `holes` holes.
    """
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    names: dict[int, str] = {}
    ends: dict[int, int] = {}
    begun: dict[int, dict[str, Any]] = {}
    found_holes: dict[int, int] = {}
    seconds: dict[str, dict[str, float]] = {}
    for event in events:
        assert event["ph"] in ("M", "B", "E", "C")
        assert event["pid"] == 1
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "B":
            tid = event["tid"]
            assert tid in names
            assert tid not in begun, "a span begins within another"
            assert event["ts"] >= ends.get(tid, 0), "spans overlap"
            found_holes[tid] = found_holes.get(tid, -1) + (event["ts"] != ends.get(tid))
            assert found_holes[tid] <= holes, "a hole"
            begun[tid] = event
        elif event["ph"] == "E":
            start = begun.pop(event["tid"])
            assert event["ts"] >= start["ts"]
            ends[event["tid"]] = event["ts"]
            of = seconds.setdefault(names[event["tid"]], {})
            of[start["name"]] = of.get(start["name"], 0.0) + (event["ts"] - start["ts"]) / 1e6
    assert not begun, "spans that never end"
    assert len(set(ends.values())) == 1, "rows do not end together"
    return seconds
