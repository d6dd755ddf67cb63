"""Draw a simulation: one rollout over time, the RL steps, and the speed-up by setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.colours import MODES, STAGES
from tlt.report.svg import INK, Axis, Box, Chart, Line, sheet
from tlt.simulate.answer import LABELS, Figures, figures, speed_ups
from tlt.simulate.scenario import ScenarioConfig, begins_without_drafter, simulate

COLOURS = {"static": MODES["eagle3"], **MODES}
FACTORS = (0.25, 0.5, 1, 2, 4)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
TAILS = (1.5, 2, 3, 5, 8)
SHORT_STEPS = 6
"""RL steps of the simulations behind the curves; all where a drafter begins from nothing."""

Curve = list[tuple[float, dict[str, float]]]
"""Speed-ups of the modes by value of a setting."""


def what_if(config: ScenarioConfig, show: Callable[[str, float, float], None]) -> dict[str, Curve]:
    """Return end-to-end speed-ups for other numbers of engines, other drafters, other tails."""
    points = list(_points(config))
    found: dict[str, Curve] = {}
    for done, (name, value, changed) in enumerate(points):
        show("what if", done, len(points))
        modes = {mode: figures(records) for mode, records in simulate(changed).items()}
        gained = {mode: of["end_to_end"] for mode, of in speed_ups(modes).items()}
        found.setdefault(name, []).append((value, gained))
    return found


def _points(config: ScenarioConfig) -> Iterator[tuple[str, float, ScenarioConfig]]:
    steps = min(config.num_steps, SHORT_STEPS)
    accepted = "share of first draft tokens accepted"
    if begins_without_drafter(config):
        steps, accepted = config.num_steps, f"{accepted}, once trained"
    short = config.model_copy(update={"num_steps": steps})
    own = config.cluster.num_engines
    for engines in sorted({max(1, round(own * factor)) for factor in FACTORS}):
        yield "engines", engines, _with(short, "cluster", num_engines=engines)
    for acceptance in ACCEPTANCES:
        yield accepted, acceptance, _with(short, "drafter", acceptance=acceptance)
    median = config.workload.lengths.median
    for tail in TAILS if config.workload.trace is None else ():
        lengths = config.workload.lengths.model_copy(
            update={"p95": round(median * tail), "longest": round(median * tail * 2.5)}
        )
        changed = _with(short, "workload", lengths=lengths)
        yield "95th percentile of lengths, in medians", tail, changed


def _with(config: ScenarioConfig, section: str, **changes: Any) -> ScenarioConfig:
    changed = getattr(config, section).model_copy(update=changes)
    return config.model_copy(update={section: changed})


def plot_simulation(
    engine_ends: Mapping[str, Any],
    modes: Figures,
    curves: Mapping[str, Curve],
    below: Sequence[str],
    out: Path,
) -> Path:
    """Draw a simulation. `engine_ends` holds when each engine of a rollout was done, by mode.

    `below` has the answer's assumptions and its validated range.
    """
    charts = [_rollout(engine_ends), _steps(modes)]
    charts += [_curve(name, curve) for name, curve in curves.items()]
    base, *_ = modes
    *_, (best, gained) = speed_ups(modes).items()
    title = f"{LABELS[best]}: {gained['end_to_end']:.2f}x the speed of {LABELS[base]}, modelled"
    out.write_text(sheet(title, charts, ["Modelled, not measured.", *below], columns=3))
    return out


def _legend(modes: Iterable[str]) -> dict[str, str]:
    return {LABELS[mode]: COLOURS[mode] for mode in modes}


def _rollout(engine_ends: Mapping[str, Any]) -> Chart:
    lines = []
    for mode, ends in engine_ends.items():
        points = [(0.0, float(len(ends)))]
        points += [(float(end), len(ends) - n) for n, end in enumerate(sorted(ends), 1)]
        lines.append(Line(points, COLOURS[mode], stairs=True))
    return Chart(
        "the last rollout, modelled",
        Axis("seconds", 0, max(line.points[-1][0] for line in lines)),
        Axis("engines that generate", 0, max(line.points[0][1] for line in lines)),
        lines,
        _legend(engine_ends),
    )


def _steps(modes: Figures) -> Chart:
    gained = speed_ups(modes)
    boxes, names = [], {}
    for place, (mode, of) in enumerate(reversed([*modes.items()])):
        names[place + 0.5] = f"{LABELS[mode]}, {gained[mode]['end_to_end']:.2f}x"
        start_s, busy_s = 0.0, of["rollout_s"] + of["update_s"]
        ends_s = (of["rollout_s"], busy_s, max(busy_s, of["step_s"]))
        for stage, end_s in zip(("rollout", "update", "other"), ends_s, strict=True):
            says = f"{LABELS[mode]}: {stage} {end_s - start_s:.1f} s"
            boxes.append(Box((start_s, end_s), (place + 0.15, place + 0.85), STAGES[stage], says))
            start_s = end_s
    return Chart(
        "an RL step, modelled",
        Axis("seconds", 0, max(box.x[1] for box in boxes)),
        Axis("", 0, len(names), names=names),
        boxes,
        {stage: STAGES[stage] for stage in ("rollout", "update", "other")},
    )


def _curve(name: str, curve: Curve) -> Chart:
    values = [value for value, _ in curve]
    names = {value: f"{value:g}" for value in values}
    base, *others = curve[0][1]
    lines = [Line([(v, of[mode]) for v, of in curve], COLOURS[mode]) for mode in others]
    speeds = [speed for line in lines for _, speed in line.points]
    lines.append(Line([(values[0], 1.0), (values[-1], 1.0)], INK, dashed=True, stairs=True))
    return Chart(
        f"speed-up over {LABELS[base]}, modelled",
        Axis(name, values[0], values[-1], name == "engines", names=names),
        Axis("times as fast", min([0.9, *speeds]), 1.05 * max([1.0, *speeds])),
        lines,
        _legend(others),
    )
