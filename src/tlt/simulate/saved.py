"""What drafts saved in a run, by the cost model of its own engine steps.

The model is fitted to the run's timeline. It says how long plain decoding of the same tokens, with
as many requests, would have taken. The slowest engine ends a rollout, so it is what counts.

Where drafts pay, a run hardly ever decodes plainly. Then the time of an engine step without drafts
is extrapolated from draft lengths, and what drafting costs at any length counts as part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlt.contracts import OFF
from tlt.observe.timeline import LEARNER, StepTimeline
from tlt.report.view import RunView, rollouts
from tlt.simulate.calibrate import observations, prompt_tokens
from tlt.simulate.model import EngineModel, fit

MIN_PLAIN_S = 1.0
"""Fewest seconds of plain decoding that the model of it is fitted to."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of the rollouts of some RL steps, measured and modelled without drafts."""

    measured_s: float
    plain_s: float

    @property
    def gain(self) -> float:
        return self.plain_s / self.measured_s


def saved(view: RunView) -> Saved | None:
    """Compare a run's rollouts with plain decoding.

    None if the run has no drafts, or its timeline says too little.
    """
    rows = (spans for timeline in view.timelines[1:] for spans in timeline.rows.values())
    if not any(span.drafts for spans in rows for span in spans):
        return None
    try:
        engine = _engine(view)
    except ValueError:
        return None
    prompt = prompt_tokens(view)
    measured_s = plain_s = 0.0
    for timeline in view.timelines[1:]:
        for start_s, end_s in rollouts(timeline):
            engines = _seconds(timeline, start_s, end_s, engine, prompt)
            measured_s += max((measured for measured, _ in engines), default=0.0)
            plain_s += max((plain for _, plain in engines), default=0.0)
    return Saved(measured_s, plain_s) if measured_s > 0 and plain_s > 0 else None


def _engine(view: RunView) -> EngineModel:
    """Fit the model; a `ValueError` says that the engine steps are too few."""
    found = observations(view)
    if sum(o.weight for o in found if o.arm == OFF) >= MIN_PLAIN_S:
        return fit(found)
    engine = fit(o for o in found if o.arm != OFF)
    return replace(engine, step=engine.step + engine.drafting, drafting=0.0)


def _seconds(
    timeline: StepTimeline, start_s: float, end_s: float, engine: EngineModel, prompt: float
) -> list[tuple[float, float]]:
    """Return the seconds of every engine in a rollout: measured, and by plain decoding.

    A span that decoded plainly took what it took; only spans with drafts are modelled.
    """
    found = []
    for worker, spans in timeline.rows.items():
        measured = plain = position = 0.0
        for span in spans:
            if worker == LEARNER or not start_s <= span.start_s < end_s or not span.tokens:
                continue
            gained = span.tokens / max(1.0, span.running)
            context = prompt + position + gained / 2
            position += gained
            measured += span.seconds
            if span.drafts:
                plain += gained * float(engine.step_s(OFF, max(1.0, span.running), context))
            else:
                plain += span.seconds
        if measured:
            found.append((measured, plain))
    return found
