"""Dispatch by forecast lengths, and look-ahead, modelled (`dispatch.py`, `simulated_ahead.py`)."""

from __future__ import annotations

from registry.core import Doc, Rows, figures, limits, percent, table, times

FORECASTS = {
    "known": "last epoch known",
    "unknown": "nothing known",
    "noisy": "off by a random factor",
    "exchanged": "long and short exchanged",
}


@table("dispatch", "dispatch")
def compared(d: Doc) -> Rows:
    rows = [["engine", "engines", "requests", "spread", "idle by arrival", "idle, longest first"]]
    rows[0] += FORECASTS.values()
    for row in d["rows"]:
        found = row["found"]
        waits = "all run" if row["slots"] >= d["settings"]["samples"] else "half wait"
        cells = [row["machine"], str(row["engines"]), waits, row["spread"]]
        cells += [percent(found[name]["idle_share"]) for name in ("arrival", "known")]
        gained = (times(found[name]["speed_up"]) if name in found else "" for name in FORECASTS)
        rows.append([*cells, *gained])
    return rows


@table("dispatch.sizes", "dispatch")
def by_size(d: Doc) -> Rows:
    """One row per number of engines: the ranges of speed-ups over the spreads."""
    rows = [["GPUs", "half of the requests wait, last epoch known", "nothing known"]]
    rows[0] += ["all requests run at once, last epoch known", "nothing known"]
    for engines in sorted({row["engines"] for row in d["rows"]}):
        cells = [
            gains(d, forecast, waits, engines)
            for waits in (True, False)
            for forecast in ("known", "unknown")
        ]
        rows.append([str(engines), *cells])
    return rows


def gains(d: Doc, forecast: str, waits: bool, engines: int | None = None) -> str:
    """Return the range of speed-ups where all requests run at once, or some wait."""
    rows = [row for row in d["rows"] if (row["slots"] < d["settings"]["samples"]) == waits]
    rows = [row for row in rows if engines in (None, row["engines"])]
    found = [row["found"][forecast]["speed_up"] for row in rows if forecast in row["found"]]
    return limits(found) + "x"


figures(
    "dispatch",
    "dispatch",
    {
        f"{forecast}.{name}": lambda d, forecast=forecast, waits=waits: gains(d, forecast, waits)
        for forecast in FORECASTS
        for name, waits in (("waits", True), ("runs", False))
    },
)


@table("simulated_ahead", "simulated_ahead")
def ahead(d: Doc) -> Rows:
    """One row per number of GPUs and length of responses: speed-ups by agreement."""
    agreements = sorted({row["agreement"] for row in d["found"]})
    rows = [["GPUs", "responses", *(f"agreement {value}" for value in agreements)]]
    by_kind: dict[tuple[int, str], dict[float, float]] = {}
    for row in d["found"]:
        kind = by_kind.setdefault((row["gpus"], row["lengths"]), {})
        kind[row["agreement"]] = row["speed_up"]
    for (gpus, lengths), found in by_kind.items():
        rows.append([str(gpus), lengths, *(times(found[value]) for value in agreements)])
    return rows
