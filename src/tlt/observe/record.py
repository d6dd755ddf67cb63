"""A run's records on disk, one line per RL step: `metrics.jsonl`, `lengths.jsonl`.

A line is on disk when `append` returns. A killed writer leaves at most one torn last line; readers
skip it and the next writer drops it. A resumed run calls `rewind` with the RL step it continues
from: no RL step is recorded twice. Values that are not finite are written as Python's json does
(`NaN`): a diverged run stays visible. Readers refuse a file that no run has written, with a
`ConfigError` that names the line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError
from tlt.observe.metrics import check_names

LARGEST = 1e100
"""Largest finite value that a record may hold: sums and squares of it are finite."""
MOST = 10**12
"""Largest number of an RL step, and largest number of tokens."""
Lines = list[tuple[bytes, dict[str, Any]]]
"""The bytes of each line, and the record in it."""


class StepLog:
    """The only writer of a file of records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        lines = _complete(content, path)
        if sum(len(line) for line, _ in lines) != len(content):
            _replace(path, [line for line, _ in lines])
        self._last_step = _last_step(lines)
        self._file = _open(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record of an RL step later than all others."""
        step = int(record["step"])
        assert self._last_step is None or step > self._last_step, (
            f"step {step} after step {self._last_step}"
        )
        line = json.dumps(dict(record)).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{self._path}: the disk is full")
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)  # or the next line would continue this one
            raise
        self._last_step = step

    def rewind(self, step: int) -> None:
        """Drop the records after `step`; -1 drops all. A crash meanwhile loses no record."""
        lines = _complete(self._path.read_bytes(), self._path)
        kept = [(line, record) for line, record in lines if record["step"] <= step]
        if len(kept) != len(lines):
            self._file.close()
            _replace(self._path, [line for line, _ in kept])
            self._last_step = _last_step(kept)
            self._file = _open(self._path)

    def close(self) -> None:
        self._file.close()


class MetricsLog(StepLog):
    """A log that accepts only declared metrics."""

    def append(self, record: Mapping[str, Any]) -> None:
        check_names(record)
        super().append(record)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all records but a torn last one. Safe while a run writes."""
    return [record for _, record in _complete(path.read_bytes(), path)]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the records of `metrics.jsonl`, whose values are numbers."""
    records = read(path)
    for number, record in enumerate(records, 1):
        for name, value in record.items():
            if not _is_number(value):
                raise ConfigError(
                    f"{path}, line {number}: {name} is {repr(value)[:40]}, which no run writes; "
                    "remove the line"
                )
    return records


def read_lengths(path: Path) -> list[list[int]]:
    """Return the tokens of every response from `lengths.jsonl`, if there is one, by RL step."""
    found = []
    for number, record in enumerate(read(path) if path.exists() else [], 1):
        tokens = record.get("tokens")
        if not isinstance(tokens, list) or not all(_is_count(n) for n in tokens):
            raise ConfigError(
                f"{path}, line {number}: 'tokens' is not a list of lengths; remove the line"
            )
        found.append(tokens)
    return found


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST or (isinstance(value, float) and not math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _open(path: Path) -> FileIO:
    # Unbuffered: a record is one write, without a flush.
    return path.open("ab", buffering=0)


def _last_step(lines: Lines) -> int | None:
    return int(lines[-1][1]["step"]) if lines else None


def _complete(content: bytes, path: Path) -> Lines:
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
            if number == len(lines):
                continue  # torn
        if not isinstance(record, dict) or not _is_count(record.get("step")):
            raise ConfigError(
                f"{path}, line {number} is not the record of an RL step; remove the line"
            )
        records.append((line, record))
    return records


def _replace(path: Path, lines: list[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
