"""The time that drafts saved in a run, by a cost model of its engine steps.

The model is fitted to the run's timeline. It says how much longer plain decoding of the same
tokens, with as many requests, would have taken. Everything else takes as long as measured: prompts,
and the rollout's work besides engine steps. The slowest engine ends a rollout, so only that engine
counts.

Where drafts pay, a run rarely decodes plainly. The few draft lengths that its strategy uses do not
show the cost of drafting: fits to measured pairs were off by up to half. There only a bound is
known: a plain engine step takes no longer than one with drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt.contracts import OFF, Arm
from tlt.report.view import RunView
from tlt.simulate.calibrate import Decoded, decoded, observations
from tlt.timing.model import EngineModel, fit

MIN_PLAIN_S = 1.0
"""Fewest seconds of plain decoding to fit the model to."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of the rollouts of some RL steps, measured and modelled without drafts."""

    measured_s: float
    plain_s: float
    is_bound: bool
    """Whether `plain_s` is only an upper bound, because the run has too little plain decoding."""

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
    found = observations(view)
    try:
        engine = fit(found)
    except ValueError:
        return None
    is_bound = sum(o.weight for o in found if o.arm == OFF) < MIN_PLAIN_S
    measured_s = plain_s = 0.0
    for start_s, end_s, engines in decoded(view):
        busy_s = [sum(each.span.seconds for each in spans) for spans in engines]
        added_s = [
            sum(_added_s(each, None if is_bound else engine) for each in spans) for spans in engines
        ]
        plain = [busy + added for busy, added in zip(busy_s, added_s, strict=True)]
        measured_s += end_s - start_s
        plain_s += end_s - start_s - max(busy_s, default=0.0) + max(plain, default=0.0)
    return Saved(measured_s, plain_s, is_bound) if measured_s > 0 and plain_s > 0 else None


def _added_s(each: Decoded, engine: EngineModel | None) -> float:
    """Return how much longer plain decoding of a span's tokens takes, by the model.

    Without a model it takes as many engine steps as a request has tokens, each as long as with
    drafts.
    """
    span, steps, context = each
    if not span.drafts:
        return 0.0
    running = max(1.0, span.running)
    gained = span.tokens / running
    if engine is None:
        return span.seconds * (gained / max(1.0, steps) - 1)
    plain_s = gained * engine.step_s(OFF, running, context)
    return float(plain_s - steps * engine.step_s(Arm.parse(span.arm), running, context))
