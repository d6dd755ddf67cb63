"""Draw a simulation: one rollout over time, the RL steps, and the speed-up by setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from tlt.simulate.answer import LABELS, figures, speed_ups
from tlt.simulate.scenario import ScenarioConfig, begins_without_drafter, simulate

COLOURS = {"off": "C7", "static": "C0", "ngram": "C2", "frozen": "C4", "tlt": "C1"}
FOOTNOTE_WIDTH = 230
"""Characters in a line below the panels."""
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
        yield (
            accepted, acceptance,
            _with(short, "drafter", acceptance=acceptance),
        )  # fmt: skip
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
    modes: Mapping[str, Mapping[str, float]],
    curves: Mapping[str, Curve],
    below: Sequence[str],
    out: Path,
) -> Path:
    """Draw a simulation. `engine_ends` holds when each engine of a rollout was done, by mode.

    `below` is what the answer assumes and where it was validated.
    """
    from tlt.pictures import pyplot

    figure, axes = pyplot.subplots(1, 2 + len(curves), figsize=(4.2 * (2 + len(curves)), 3.8))
    _plot_rollout(axes[0], engine_ends)
    _plot_steps(axes[1], modes)
    for panel, (name, curve) in zip(axes[2:], curves.items(), strict=True):
        _plot_curve(panel, name, curve)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    lines = [part for line in below for part in wrap(line, FOOTNOTE_WIDTH)]
    note = "\n".join(["Modelled, not measured.", *lines])
    figure.text(0.01, -0.02, note, va="top", fontsize=8)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return out


def _label(mode: str) -> str:
    return LABELS.get(mode, mode)


def _plot_rollout(panel: Any, engine_ends: Mapping[str, Any]) -> None:
    for name, ends in engine_ends.items():
        times = np.concatenate([[0.0], np.sort(ends)])
        busy = np.arange(len(ends), -1, -1)
        panel.step(times, busy, where="post", color=COLOURS[name], label=_label(name))
    panel.set(title="the last rollout, modelled", xlabel="seconds", ylabel="engines that generate")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, loc="upper right")


def _plot_steps(panel: Any, modes: Mapping[str, Mapping[str, float]]) -> None:
    names = list(modes)
    rollout = np.array([modes[name]["rollout_s"] for name in names])
    update = np.array([modes[name]["update_s"] for name in names])
    other = np.maximum(0.0, np.array([modes[name]["step_s"] for name in names]) - rollout - update)
    left = np.zeros(len(names))
    for label, part, colour in (
        ("rollout", rollout, "C0"), ("update", update, "C3"), ("other", other, "C7"),
    ):  # fmt: skip
        panel.barh([_label(name) for name in names], part, left=left, color=colour, label=label)
        left = left + part
    for place, gained in enumerate(speed_ups(modes).values()):
        panel.text(left[place], place, f" {gained['end_to_end']:.2f}x", va="center")
    panel.invert_yaxis()
    panel.set_xlim(right=1.2 * left.max())
    panel.set(title="an RL step, modelled", xlabel="seconds")
    panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


def _plot_curve(panel: Any, name: str, curve: Curve) -> None:
    values: Sequence[float] = [value for value, _ in curve]
    for mode in list(curve[0][1])[1:]:
        speeds = [of[mode] for _, of in curve]
        panel.plot(values, speeds, "o-", color=COLOURS[mode], label=_label(mode))
    base = next(iter(curve[0][1]))
    panel.axhline(1.0, color=COLOURS[base], linewidth=1)
    if name == "engines":
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.minorticks_off()
    panel.set(title=f"speed-up over {_label(base)}, modelled", xlabel=name)
    panel.legend(frameon=False, loc="upper left")
