"""Whole RL runs with and without TLT, one after the other, from before arms took turns."""

from __future__ import annotations

import statistics
from typing import Any

from registry.core import Doc, Rows, count, figures, limits, ms, percent, several, table, times

LABELS = {
    "off": "no speculation",
    "static": "frozen drafter, 3 draft tokens",
    "ngram": "TLT without a draft model",
    "tlt": "TLT",
    "unpublished": "TLT, drafters not published",
}
Run = dict[str, Any]


def uncounted(d: Doc) -> list[int]:
    """Repeats that the file says to leave out."""
    return (d.get("left_out") or {}).get("repeats", [])


def kept(d: Doc, arm: str) -> list[Run]:
    """Runs of an arm in the repeats that count."""
    return [run for repeat, run in enumerate(d["runs"][arm]) if repeat not in uncounted(d)]


def ratios(d: Doc, arm: str, key: str, base: str | None = None) -> list[float]:
    """How many times as fast as `base` an arm is, repeat by repeat."""
    base = base or next(iter(d["runs"]))
    return [a[key] / b[key] for a, b in zip(kept(d, base), kept(d, arm), strict=True)]


def per_step(d: Doc, arm: str, key: str) -> float:
    runs = kept(d, arm)
    return sum(run[key] for run in runs) / (len(runs) * d["steps"])


def speed_ups(d: Doc) -> Rows:
    base, *arms = d["runs"]
    rows = [[f"against {LABELS[base]}", "end to end", "rollout"]]
    for arm in arms:
        cells = [several(ratios(d, arm, key)) for key in ("step_s", "rollout_s")]
        rows.append([LABELS[arm], *cells])
    return rows


def stages(d: Doc) -> Rows:
    base = next(iter(d["runs"]))
    rows = [["", "end to end", "rollout", "an RL step", "its rollout", "its update", "the rest"]]
    for arm in d["runs"]:
        faster = [several(ratios(d, arm, key)) for key in ("step_s", "rollout_s")]
        step, rollout, update = (
            per_step(d, arm, key) for key in ("step_s", "rollout_s", "update_s")
        )
        seconds = (step, rollout, update, step - rollout - update)
        cells = ["1", "1"] if arm == base else faster
        rows.append([LABELS[arm], *cells, *(f"{value:.1f} s" for value in seconds)])
    return rows


table("e2e.tail.speed_ups", "e2e/tail")(speed_ups)
table("e2e.tail", "e2e/tail")(stages)
table("e2e.equal", "e2e/equal")(stages)


@table("e2e.tail.repeats", "e2e/tail")
def repeats(d: Doc) -> Rows:
    """Every repeat, also those that are left out."""
    base, *arms = d["runs"]
    rows = [["repeat", *(LABELS[arm] for arm in arms), "TLT against the frozen drafter"]]
    for repeat in range(d["repeats"]):
        step_s = {arm: d["runs"][arm][repeat]["step_s"] for arm in d["runs"]}
        note = " (left out)" if repeat in uncounted(d) else ""
        cells = [times(step_s[base] / step_s[arm]) for arm in arms]
        rows.append([f"{repeat + 1}{note}", *cells, times(step_s["static"] / step_s["tlt"])])
    return rows


def left_out(d: Doc) -> str:
    """Return which repeats do not count, and why."""
    if not uncounted(d):
        return "no repeat is left out"
    named = " and ".join(str(each + 1) for each in uncounted(d))
    return f"repeat {named} is left out: {d['left_out']['why']}"


def harvest(d: Doc, key: str) -> list[float]:
    return [run["harvest"][key] for run in kept(d, "tlt")]


def used(d: Doc) -> list[float]:
    pairs = zip(harvest(d, "used_s"), harvest(d, "coverable_s"), strict=True)
    return [part / whole for part, whole in pairs]


def idle_s_per_step(d: Doc) -> str:
    return several([idle / d["steps"] for idle in harvest(d, "idle_s")], "{:.1f}", " s")


def accepted(d: Doc, arm: str, first: int = 0, last: int | None = None) -> str:
    """Mean tokens a request gets in an engine step, over some RL steps."""
    values = [value for run in kept(d, arm) for value in run["acceptance"][first:last]]
    return f"{statistics.fmean(values):.2f}"


figures(
    "e2e.tail",
    "e2e/tail",
    {
        "steps": lambda d: str(d["steps"]),
        "repeats_kept": lambda d: str(len(kept(d, "tlt"))),
        "repeats_all": lambda d: str(d["repeats"]),
        "left_out": left_out,
        "static": lambda d: several(ratios(d, "static", "step_s")),
        "tlt": lambda d: several(ratios(d, "tlt", "step_s")),
        "tlt_against_static": lambda d: several(ratios(d, "tlt", "step_s", "static")),
        "rollout_share": lambda d: percent(
            statistics.fmean(run["rollout_share"] for run in kept(d, "off"))
        ),
        "median_tokens": lambda d: limits([r["median_tokens"] for r in kept(d, "off")], "{:.0f}"),
        "longest_tokens": lambda d: count(max(r["longest_tokens"] for r in kept(d, "off"))),
        "off_minutes": lambda d: limits([r["step_s"] / 60 for r in d["runs"]["off"]], "{:.1f}"),
        "accepted.static": lambda d: accepted(d, "static"),
        "accepted.tlt": lambda d: accepted(d, "tlt"),
        "harvest.used": lambda d: several(used(d), unit=""),
        "harvest.idle_s_per_step": idle_s_per_step,
        "harvest.published": lambda d: several(harvest(d, "published"), "{:.0f}", ""),
        "harvest.stop_max": lambda d: ms(max(harvest(d, "stop_max_s"))),
    },
)

figures(
    "e2e.equal",
    "e2e/equal",
    {
        "tlt": lambda d: several(ratios(d, "tlt", "step_s")),
        "static.rollout": lambda d: several(ratios(d, "static", "rollout_s")),
        "tokens": lambda d: count(max(r["longest_tokens"] for r in kept(d, "off"))),
    },
)
