"""The pace of a modelled engine under a production strategy.

A player runs a strategy engine step by engine step at a few batch sizes, from large to small as in
a rollout, until the strategy settles on an arm. That takes some dozens of engine steps per batch
size instead of the thousands of a real rollout. The arm gives the pace at that batch size. The time
lost to trials is added once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.contracts import OFF, Arm, StepContext, StepReport, Strategy
from tlt.simulate.model import Drafting, EngineModel
from tlt.strategy.step_time import batch_bucket

STEPS = 32
"""Engine steps to play at each batch size."""
NOISE = 0.05
"""Relative standard deviation of step times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per token of a request, relative to plain decoding, by batch size."""

    ratios: Any
    """Ratios by number of running requests; the first entry is for none."""
    arms: dict[int, Arm]
    """Arm that the strategy settled on, by batch size."""
    trying_s: float
    """Seconds lost to trials in one rollout."""


class Player:
    """The strategy of one engine over the rollouts of a run; its estimates persist."""

    def __init__(self, strategy: Strategy, model: EngineModel, seed: int = 0) -> None:
        self._strategy = strategy
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._step = 0
        self._verified = OFF

    def rollout(self, drafting: Drafting, version: int, most: int, context: float) -> Pace:
        """Play a rollout that begins with `most` requests."""
        ratios = np.ones(most + 1)
        arms: dict[int, Arm] = {}
        trying_s = 0.0
        for running in _sizes(most):
            arm, lost_s = self._settle(running, context, drafting, version)
            pace_s = self._model.step_s(arm, running, context) / drafting.tokens(arm)
            plain_s = self._model.step_s(OFF, running, context)
            arms[running] = arm
            ratios[running] = pace_s / plain_s
            trying_s += lost_s
        known = np.array(sorted(arms))
        every = np.arange(1, most + 1)
        ratios[1:] = np.interp(every, known, ratios[known])
        return Pace(ratios, arms, trying_s)

    def _settle(
        self, running: int, context: float, drafting: Drafting, version: int
    ) -> tuple[Arm, float]:
        seconds = tokens = 0.0
        decided: list[Arm] = []
        for _ in range(STEPS):
            proposed = self._strategy.decide(
                StepContext(self._step, running, 0, 0, drafter_version=version)
            )
            report = self._one_step(running, context, drafting, proposed, version)
            self._strategy.observe(report)
            seconds += report.elapsed_s
            tokens += report.num_output_tokens / running
            decided.append(proposed)
            self._verified = proposed
            self._step += 1
        arm = Counter(decided[STEPS // 2 :]).most_common(1)[0][0]
        settled_s = self._model.step_s(arm, running, context) / drafting.tokens(arm)
        return arm, max(0.0, float(seconds - tokens * settled_s))

    def _one_step(
        self, running: int, context: float, drafting: Drafting, proposed: Arm, version: int
    ) -> StepReport:
        verified = self._verified
        accepted_at = []
        left, before = running, 1.0
        for position in range(verified.num_draft_tokens):
            rate = drafting.rate(verified.drafter, position)
            left = int(self._rng.binomial(left, min(1.0, rate / before))) if left else 0
            before = rate if rate > 0 else 1.0
            accepted_at.append(left)
        both = self._model.step_s(verified, running, context) + self._model.step_s(
            proposed, running, context
        )
        elapsed_s = float(both / 2) * math.exp(self._rng.normal(0, NOISE))
        drafts = running if verified.num_draft_tokens else 0
        return StepReport(
            step=self._step,
            verified=verified,
            proposed=proposed,
            num_decodes=running,
            num_prefill_tokens=0,
            num_drafts=drafts,
            num_draft_tokens=drafts * verified.num_draft_tokens,
            num_accepted_tokens=sum(accepted_at),
            accepted_at=tuple(accepted_at),
            num_output_tokens=running + sum(accepted_at),
            elapsed_s=elapsed_s,
            drafter_version=version,
        )


def _sizes(most: int) -> list[int]:
    """Return the batch sizes that a strategy distinguishes, largest first."""
    return sorted({min(most, batch_bucket(n)) for n in range(1, most + 1)}, reverse=True)
