"""Calibrate a model of a machine from runs on it: their timelines, lengths and metrics.

The runs need no extra measurements: a span of a timeline holds the number of requests, the arm, the
tokens and the seconds. In an engine step, every request gets one token and the accepted tokens of
its draft, so engine steps x running = tokens - accepted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, isfinite, log
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tlt.config.load import read_json
from tlt.contracts import Arm
from tlt.errors import ConfigError
from tlt.observe.timeline import LEARNER, StepTimeline
from tlt.report.view import RunView, rollouts
from tlt.simulate.cluster import Learner, Record, Training
from tlt.spans import Span
from tlt.timing.model import Amount, Drafting, EngineModel, Observation, fit, powers
from tlt.timing.profiles import DRIFT

MIN_STEPS = 3
"""Engine steps that a span needs to measure the time of one."""
MIN_VERIFIED = 20
"""Requests verified that a draft length needs to measure its acceptance."""
MAX_POSITIONS = 16
MIN_DRIFT_STEPS = 6
"""RL steps with drafts that a run needs to measure how acceptance drifts."""
START_STEPS = 3
"""First RL steps, whose mean acceptance is the acceptance at the start."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The model of a machine and of a policy on it."""

    engine: EngineModel
    drafting: Drafting
    learner: Learner
    prompt_tokens: Amount
    training: Training = field(default_factory=Training)
    source: str = ""
    num_gpus: int = 0
    """GPUs of an engine in these runs."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        what = "a result of `tlt simulate calibrate`"
        way_out = "make one with `tlt simulate calibrate RUN --out calibration.json`"
        try:
            return _checked(read_json(path, what, way_out))
        except ValueError as error:
            raise ConfigError(f"{path} is not {what} ({error}); {way_out}") from error


def _checked(figures: dict[str, Any]) -> Calibration:
    """Raise a `ValueError` if a machine with these figures would take no time, or infinite time."""
    try:
        return TypeAdapter(Calibration).validate_python(figures)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def calibrate(views: Sequence[RunView]) -> Calibration:
    """Fit one model to all these runs, without their first RL steps, which warm up."""
    source = ", ".join(view.name for view in views)
    found = [o for view in views for o in observations(view)]
    if not found:
        raise ConfigError(
            f"{source}: no timeline to calibrate from; give runs with metrics.timeline = true, of "
            "at least three steps"
        )
    try:
        engine = fit(found, _prefill_speed(views))
    except ValueError as error:
        raise ConfigError(f"{error}; give runs with other batches or draft lengths too") from error
    calibration = Calibration(
        engine,
        Drafting(_acceptance(views)),
        learner(views),
        fmean(prompt_tokens(view) for view in views),
        training([view.records for view in views]),
        source,
        max(int(view.setting("engine.num_gpus", 0)) for view in views),
    )
    try:
        return _checked(asdict(calibration))
    except ValueError as error:
        raise ConfigError(
            f"the metrics of {source} describe no machine ({error}); give other runs"
        ) from error


# --- timelines ------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    """A span in which an engine generated, with its engine steps and its mean context."""

    span: Span
    steps: float
    context: float


def _rows(timeline: StepTimeline) -> list[list[Span]]:
    """Return the spans of every engine."""
    return [list(spans) for worker, spans in timeline.rows.items() if worker != LEARNER]


def decoded(view: RunView) -> Iterator[tuple[float, float, list[list[Decoded]]]]:
    """Yield start, end and every engine's spans of the rollouts after the first RL step."""
    prompt = prompt_tokens(view)
    for timeline in view.timelines[1:]:
        for start_s, end_s in rollouts(timeline):
            engines = []
            for spans in _rows(timeline):
                position, found = 0.0, []
                for span in spans:
                    if start_s <= span.start_s < end_s and span.tokens and span.seconds > 0:
                        running = max(1.0, span.running)
                        gained = span.tokens / running
                        steps = (span.tokens - span.accepted) / running
                        found.append(Decoded(span, steps, prompt + position + gained / 2))
                        position += gained
                if found:
                    engines.append(found)
            yield start_s, end_s, engines


def prompt_tokens(view: RunView) -> float:
    """Return the mean length of a run's prompts."""
    found = [r["prompt/mean_tokens"] for r in view.records if r.get("prompt/mean_tokens")]
    return fmean(found) if found else 0.0


def observations(view: RunView) -> list[Observation]:
    """Return the engine steps of a run, with their number of requests and their context."""
    return [
        Observation(Arm.parse(span.arm), span.running, context, span.seconds / steps, span.seconds)
        for _, _, engines in decoded(view)
        for spans in engines
        for span, steps, context in spans[1:]  # the first span also reads the prompts
        if not span.mixed and steps >= MIN_STEPS
    ]


def _prefill_speed(views: Sequence[RunView]) -> float:
    """Return prompt tokens per second, from the time of the first span of a rollout."""
    speeds: list[float] = []
    for view in views:
        group = max(1, int(view.setting("sampling.group_size", 1)))
        prompt = prompt_tokens(view)
        for start_s, _, engines in decoded(view):
            for first in (spans[0].span for spans in engines if spans[0].span.running >= 1):
                seconds = max(1e-3, first.start_s - start_s + first.seconds)
                speeds.append(max(1.0, first.running / group) * prompt / seconds)
    return median(speeds) if speeds and median(speeds) > 0 else 1e9


def _acceptance(views: Sequence[RunView]) -> dict[str, tuple[float, ...]]:
    """Return acceptance rates by position, from the accepted tokens of each draft length.

    The model assumes that rates fall by the same factor from position to position. One rate then
    explains the accepted tokens of a draft length. The result is the mean over draft lengths,
    weighted by use.
    """
    gained: dict[Arm, list[float]] = {}
    rows = (row for view in views for timeline in view.timelines[1:] for row in _rows(timeline))
    for span in itertools.chain.from_iterable(rows):
        if span.drafts and not span.mixed:
            of = gained.setdefault(Arm.parse(span.arm), [0.0, 0.0])
            of[0] += span.accepted
            of[1] += span.tokens - span.accepted  # requests verified, also those without a draft
    weighted: dict[str, list[tuple[float, float]]] = {}
    for arm, (accepted, verified) in gained.items():
        if arm.num_draft_tokens and verified >= MIN_VERIFIED:
            rate = _rate_for(accepted / verified, arm.num_draft_tokens)
            weighted.setdefault(arm.drafter, []).append((rate, verified))
    return {
        drafter: powers(sum(r * n for r, n in pairs) / sum(n for _, n in pairs), MAX_POSITIONS)
        for drafter, pairs in weighted.items()
    }


def _rate_for(gained: float, length: int) -> float:
    """Return the factor whose first `length` powers add up to `gained`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(powers(middle, length)) < gained:
            low = middle
        else:
            high = middle
    return low


# --- metrics --------------------------------------------------------------------------------------


def learner(views: Sequence[RunView]) -> Learner:
    """Fit a line to the updates' tokens and seconds, and take medians of the other times."""
    records: list[Record] = []
    points: list[tuple[float, float]] = []
    whole = prompts = trained = shared = 0.0
    for view in views:
        own = as_scenario(view)
        prompts_of_a_step = own["prompts_per_step"] * own["group_size"] * own["prompt_tokens"]
        for record in view.records[1:]:
            records.append(record)
            prompts += prompts_of_a_step
            whole += record.get("rollout/output_tokens", 0.0) + prompts_of_a_step
            tokens, seconds = record.get("learner/tokens", 0.0), record.get("time/update_s", 0.0)
            spared = tokens * record.get("learner/shared_share", 0.0)
            if isfinite(tokens + seconds) and tokens > spared and seconds > 0:
                trained += tokens
                shared += spared
                points.append((tokens - spared, seconds))
    if not points:
        raise ConfigError(
            f"{', '.join(view.name for view in views)}: no RL step updated the policy; give a run "
            "in which rewards differ within a group"
        )
    mean_t, mean_s = fmean(t for t, _ in points), fmean(s for _, s in points)
    variance = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (s - mean_s) for t, s in points) / variance if variance else 0.0
    if not 0 < slope * mean_t <= mean_s:  # noise or equal updates: all time is per token
        slope = mean_s / mean_t
    trained_share = min(1.0, trained / max(1.0, whole))
    return Learner(
        tokens_per_s=1 / slope,
        step_s=max(0.0, mean_s - slope * mean_t),  # rounding may go below
        trained_share=trained_share,
        prompt_share=max(0.0, 1 - shared / max(1.0, trained_share * prompts)),
        reward_s=median(r.get("time/reward_wait_s", 0.0) for r in records),
        sync_s=median(r.get("time/sync_s", 0.0) for r in records),
        other_s=fmean(
            r.get("time/other_s", 0.0) + r.get("time/checkpoint_s", 0.0) for r in records
        ),
    )


def training(runs: Sequence[Sequence[Record]]) -> Training:
    """Fit how acceptance fell with a frozen drafter, and how training restored it.

    The acceptance rate is the share of drafts whose first token was accepted. The model expresses
    it as a power of the rate at the start. Every policy update adds the same amount to that power,
    and training lowers it towards a best power. Runs that use a draft model in fewer than
    `MIN_DRIFT_STEPS` RL steps are left out; if none is left, `profiles.py` gives the drift.
    """
    found = Training(drift=DRIFT)
    curves = [curve for curve in map(_powers, runs) if len(curve) >= MIN_DRIFT_STEPS]
    trained = [curve for curve in curves if any(tokens for _, tokens in curve)]
    slopes = [
        linear_regression(range(len(curve)), [power for power, _ in curve]).slope
        for curve in curves
        if curve not in trained
    ]
    if slopes:
        found = replace(found, drift=max(0.0, fmean(slopes)))
    if not trained:
        return found
    used_s = sum(r.get("harvest/used_s", 0.0) for run in runs for r in run)
    tokens = sum(r.get("harvest/trained_tokens", 0.0) for run in runs for r in run)
    choices = (
        replace(found, tokens=10 ** (3 + size / 10), best_power=best / 50)
        for size in range(51)
        for best in range(10, 61)
    )
    best = min(choices, key=lambda choice: sum(_error(curve, choice) for curve in trained))
    return replace(best, tokens_per_s=tokens / used_s if used_s else found.tokens_per_s)


def _powers(run: Sequence[Record]) -> list[tuple[float, float]]:
    """Return, by RL step, the power of the rate at the start and the tokens trained on."""
    steps = [r for r in run if 0 < r.get("rollout/drafter_hit_share", 0.0) < 1]
    if not steps:
        return []
    at_start = log(fmean(r["rollout/drafter_hit_share"] for r in steps[:START_STEPS]))
    return [
        (log(r["rollout/drafter_hit_share"]) / at_start, r.get("harvest/trained_tokens", 0.0))
        for r in steps
    ]


def _error(curve: Sequence[tuple[float, float]], choice: Training) -> float:
    """Return the squared error of the powers that this choice predicts."""
    predicted = [1.0]
    for _, tokens in curve[:-1]:
        behind = predicted[-1] + choice.drift - choice.best_power
        predicted.append(choice.best_power + behind * exp(-max(0.0, tokens) / choice.tokens))
    at_start = fmean(predicted[:START_STEPS])
    return sum((seen - p / at_start) ** 2 for (seen, _), p in zip(curve, predicted, strict=True))


def as_scenario(view: RunView) -> dict[str, Any]:
    """Return a run's own workload, as settings of a scenario."""
    return {
        "prompts_per_step": int(view.setting("sampling.prompts_per_step", 1)),
        "group_size": int(view.setting("sampling.group_size", 1)),
        "prompt_tokens": prompt_tokens(view),
    }
