"""What drafts saved in a run, by the cost model of its own engine steps.

The model is fitted to the run's timeline. It says how much longer plain decoding of the same
tokens, with as many requests, would have taken. All else takes what it took: prompts, and whatever
a rollout does besides engine steps. The slowest engine ends a rollout, so it is what counts.

Where drafts pay, a run hardly ever decodes plainly. The few draft lengths that its strategy uses do
not tell what drafting costs: fits to measured pairs were off by up to half. There only a bound is
known: a plain engine step takes no longer than one with drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt.contracts import OFF, Arm
from tlt.observe.timeline import StepTimeline
from tlt.report.view import RunView, rollouts
from tlt.simulate.calibrate import engine_spans, observations, prompt_tokens
from tlt.simulate.model import EngineModel, fit

MIN_PLAIN_S = 1.0
"""Fewest seconds of plain decoding that the model of it is fitted to."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of the rollouts of some RL steps, measured and modelled without drafts."""

    measured_s: float
    plain_s: float
    is_bound: bool
    """Whether plain decoding takes at most `plain_s`: the run has too little of it to model it."""

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
    prompt = prompt_tokens(view)
    measured_s = plain_s = 0.0
    for timeline in view.timelines[1:]:
        for start_s, end_s in rollouts(timeline):
            engines = _seconds(timeline, start_s, end_s, None if is_bound else engine, prompt)
            besides_s = end_s - start_s - max((measured for measured, _ in engines), default=0.0)
            measured_s += end_s - start_s
            plain_s += besides_s + max((plain for _, plain in engines), default=0.0)
    return Saved(measured_s, plain_s, is_bound) if measured_s > 0 and plain_s > 0 else None


def _seconds(
    timeline: StepTimeline, start_s: float, end_s: float, engine: EngineModel | None, prompt: float
) -> list[tuple[float, float]]:
    """Return the seconds of every engine in a rollout: measured, and by plain decoding.

    The model gives the difference of spans with drafts. Without one, plain decoding takes as many
    engine steps as a request has tokens, each as long as with drafts.
    """
    found = []
    for spans in engine_spans(timeline, start_s, end_s, prompt):
        measured = plain = sum(span.seconds for span, _, _ in spans)
        for span, steps, context in spans:
            if span.drafts:
                running = max(1.0, span.running)
                gained = span.tokens / running
                if engine is None:
                    plain += span.seconds * (gained / max(1.0, steps) - 1)
                else:
                    plain += gained * float(engine.step_s(OFF, running, context))
                    plain -= steps * float(engine.step_s(Arm.parse(span.arm), running, context))
        if measured:
            found.append((measured, plain))
    return found
