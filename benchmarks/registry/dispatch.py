"""Dispatch by forecast lengths against order of arrival, modelled (`dispatch.py`)."""

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


def gains(d: Doc, forecast: str, waits: bool) -> str:
    """Return the range of speed-ups where all requests run at once, or some wait."""
    rows = [row for row in d["rows"] if (row["slots"] < d["settings"]["samples"]) == waits]
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
