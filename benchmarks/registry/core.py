"""How figures are declared, where their data comes from, and the forms numbers take in text."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

Doc = dict[str, Any]
Rows = list[list[str]]


class UnknownFigure(Exception):
    """A name that nobody declared, or a figure whose data is missing."""


class Results:
    """The committed result files, read once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._docs: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a result such as "e2e/tail"."""
        if name not in self._docs:
            path = self._folder / f"{name}.json"
            if not path.exists():
                raise UnknownFigure(f"no benchmarks/results/{name}.json")
            self._docs[name] = json.loads(path.read_text())
            if "provenance" not in self._docs[name]:
                raise UnknownFigure(f"{name}.json has no provenance; run its benchmark again")
        return self._docs[name]

    def names(self) -> list[str]:
        """Return the names of all results that are one document."""
        paths = sorted(self._folder.rglob("*.json"))
        return [path.relative_to(self._folder).with_suffix("").as_posix() for path in paths]


FIGURES: dict[str, Callable[[Results], str]] = {}


def render(name: str, results: Results) -> str:
    """Return the text of the figure `name`."""
    if name not in FIGURES:
        close = get_close_matches(name, FIGURES, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UnknownFigure(f"no figure is called {name}{hint}")
    try:
        return FIGURES[name](results)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UnknownFigure(f"{name} does not find its data: {error!r}") from error


def _declare(name: str, made: Callable[[Results], str]) -> None:
    assert name not in FIGURES, f"{name} is declared twice"
    FIGURES[name] = made


def figures(prefix: str, file: str, made: dict[str, Callable[[Doc], str]]) -> None:
    """Declare figures of one result file as `prefix.key`."""
    for key, text in made.items():
        _declare(f"{prefix}.{key}", lambda results, text=text: text(results[file]))


def table(name: str, *files: str) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Declare a table of one or more result files; cores, date and files follow below it."""

    def declare(rows: Callable[..., Rows]) -> Callable[..., Rows]:
        def text(results: Results) -> str:
            docs = [results[file] for file in files]
            paths = ", ".join(f"`{file}`" for file in files)
            return f"{markdown(rows(*docs))}\n\n<sub>{sources(docs)}; results: {paths}</sub>"

        _declare(name, text)
        return rows

    return declare


def markdown(rows: Rows) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def sources(docs: Iterable[Doc]) -> str:
    """Return cores and days, such as "2 CPU cores, 2026-11-15 and 2026-11-16".

    The table `provenance` says which CPU it was.
    """
    days: dict[int, set[str]] = {}
    for doc in docs:
        record = doc["provenance"]
        days.setdefault(record["cpu"]["cores"], set()).add(record["date"][:10])
    return "; ".join(f"{n} CPU cores, {' and '.join(sorted(of))}" for n, of in days.items())


def provenance(results: Results) -> str:
    """Return a table of where and when every result was made.

    A commit ends in `+` if code had changed since, and in `*` if the record was added later.
    """
    rows = [["result", "date", "commit", "CPU"]]
    for name in results.names():
        record = results[name]["provenance"]
        commit = record["commit"] or "unknown"
        mark = "*" if record.get("backfilled") else "+" if commit.endswith("-dirty") else ""
        cpu = re.sub(r"Intel|AMD|\(R\)|Processor|@", "", record["cpu"]["model"])
        cells = [f"`{name}`", record["date"][:10], f"`{commit[:7]}{mark}`", " ".join(cpu.split())]
        rows.append(cells)
    return markdown(rows)


_declare("provenance", provenance)


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{value:.0%}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def count(value: float) -> str:
    return f"{value:,.0f}"


def spread(found: Doc, form: str = "{:.2f}", unit: str = "x") -> str:
    """Median and range of a record with `median`, `low` and `high`."""
    low, median, high = (form.format(found[key]) for key in ("low", "median", "high"))
    return f"{median}{unit} ({low} to {high})"


def several(values: Iterable[float], form: str = "{:.2f}", unit: str = "x") -> str:
    """All values of up to two repeats; of more, their median and range."""
    known = list(values)
    if len(known) <= 2:
        return " and ".join(form.format(value) + unit for value in known)
    found = {"median": statistics.median(known), "low": min(known), "high": max(known)}
    return spread(found, form, unit)


def limits(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Lowest and highest of several values."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
