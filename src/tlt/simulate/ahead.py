"""Look-ahead in simulated time: the production plan over modelled engines.

An idle engine generates requests of the next RL step without drafts. Its sample repeats a text up
to the first token that the policy update moved; every token is moved with the same probability. The
repeated tokens come in drafts by position, and their verification costs rows of engine steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt.contracts import OFF, Arm, SampleRequest, SamplingSpec
from tlt.rollout.ahead import FIRST_AGREEMENT, MIN_AGREEMENT, PREFIX, LookAhead
from tlt.rollout.lengths import LengthForecast
from tlt.simulate.clock import now_s
from tlt.simulate.model import EngineModel

DRAFT_TOKENS = 16
"""Tokens of a draft by position."""


class Ahead:
    """Texts that idle engines of one rollout generate for the next."""

    def __init__(
        self, engine: EngineModel, agreement: float, slots: int, forecast: LengthForecast, seed: int
    ) -> None:
        self._engine = engine
        self._agreement = agreement
        self._slots = slots
        self._plan = LookAhead(forecast, now_s)
        self._rng = np.random.default_rng((seed, 1))
        self._texts: Any = None
        self._made = self._repeated = 0.0

    @property
    def share(self) -> float:
        """Share of an idle spell that look-ahead takes where harvest uses the rest."""
        agreement = self._repeated / self._made if self._made else FIRST_AGREEMENT
        return max(MIN_AGREEMENT, agreement)

    def generate(
        self, prompts: Sequence[int], lengths: Any, max_tokens: int, idle_s: Any, context: float
    ) -> None:
        """Let engines that are idle for so long generate these requests ahead."""
        self._texts = np.zeros(len(lengths))
        self._plan.plan(
            SampleRequest(str(n), (int(prompt),), SamplingSpec(max_tokens, seed=n))
            for n, prompt in enumerate(prompts)
        )
        for number in np.argsort(-idle_s, kind="stable"):
            if not (chosen := self._plan.next(self._slots)):
                break
            samples = [int(request.sample_id.removeprefix(PREFIX)) for request in chosen]
            tokens = idle_s[number] / self._engine.step_s(OFF, len(samples), context)
            self._texts[samples] = np.minimum(lengths[samples], np.floor(tokens))
        self._plan.rollout_ended()

    def repeated(self, num_samples: int) -> Any:
        """Return how many tokens of its text each sample of the rollout repeats."""
        if self._texts is None:
            return np.zeros(num_samples)
        part = self._rng.geometric(1 - self._agreement, num_samples) - 1
        found = np.minimum(self._texts, part)
        self._made, self._repeated = float(self._texts.sum()), float(found.sum())
        return found

    def verification_s(self, arm: Arm, running: int) -> float:
        """Return the seconds that a repeated token adds to engine steps of this arm and size."""
        rows = max(0, DRAFT_TOKENS - arm.num_draft_tokens)
        is_dense = running * (1 + arm.num_draft_tokens) + rows > self._engine.free_rows
        row_s = self._engine.row + self._engine.dense_row * is_dense
        return rows * row_s / (1 + DRAFT_TOKENS)
