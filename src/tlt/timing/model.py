"""The time of an engine step, and the tokens it produces.

    seconds = parts . (1, rows, rows beyond the free ones, context, drafting, passes, draft rows)

Rows are the tokens that the policy computes in an engine step: one for every request and one for
every draft token to verify. The parts are fitted to runs (`fit`), or come from a profile. No part
is negative, and each is proportional to one cause, so the model extends to batches, draft lengths
and contexts that were never measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tlt.contracts import OFF, Arm

PARTS = ("step", "row", "dense_row", "context", "drafting", "draft_pass", "draft_row")
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""A figure of a machine; files with other figures are refused."""
Speed = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Observation:
    """Measured engine steps of the same kind."""

    arm: Arm
    running: float
    context: float
    """Mean number of tokens that a request attends to."""
    step_s: float
    weight: float = 1.0
    """Weight of the observation in a fit, in engine steps or seconds."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Seconds of the parts of an engine step."""

    step: Amount
    """Seconds of every engine step: reading the weights, scheduling."""
    row: Amount = 0.0
    """Seconds per row."""
    dense_row: Amount = 0.0
    """Seconds per row beyond `free_rows`, where computing takes longer than reading weights."""
    context: Amount = 0.0
    """Seconds per token of context that a request reads."""
    drafting: Amount = 0.0
    """Seconds of drafting, independent of the draft length."""
    draft_pass: Amount = 0.0
    """Seconds per forward pass of the draft model, one per draft token."""
    draft_row: Amount = 0.0
    """Seconds per draft token and request."""
    free_rows: Amount = 0.0
    prefill_tokens_per_s: Speed = 1e9

    def __post_init__(self) -> None:
        if not self.step_s(OFF, 1, 1) > 0:
            raise ValueError("an engine step takes no time")

    def step_s(self, arm: Arm, running: Any, context: Any, proposed: Arm | None = None) -> Any:
        """Return the seconds of an engine step; takes numbers or arrays.

        The step verifies drafts of `arm`, and drafts by `proposed`, or by `arm` again.
        """
        parts = np.array([getattr(self, part) for part in PARTS])
        return _features(arm, running, context, self.free_rows, proposed or arm) @ parts


def _features(arm: Arm, running: Any, context: Any, free_rows: float, proposed: Arm) -> Any:
    """Return how often each part counts."""
    running = np.asarray(running, dtype=float)
    rows = running * (1 + arm.num_draft_tokens)
    beyond = np.maximum(0.0, rows - free_rows)
    length = proposed.num_draft_tokens
    # N-grams are looked up, so they need no forward passes.
    passes = length if proposed.uses_model else 0
    found = (1.0, rows, beyond, running * context, float(length > 0), passes, passes * running)
    return np.stack(np.broadcast_arrays(*found), axis=-1)


def fit(observations: Iterable[Observation], prefill_tokens_per_s: float = 1e9) -> EngineModel:
    """Return the model with the least relative error; no part is negative."""
    found = list(observations)
    if len(found) < len(PARTS):
        raise ValueError(f"{len(found)} kinds of steps are too few to fit {len(PARTS)} parts to")
    seconds = np.array([o.step_s for o in found])
    weights = np.sqrt(np.array([o.weight for o in found])) / seconds
    columns = np.stack([_features(o.arm, o.running, o.context, 0.0, o.arm) for o in found])
    parts = _non_negative(columns * weights[:, None], seconds * weights)
    by_name = dict(zip(PARTS, map(float, parts), strict=True))
    return EngineModel(**by_name, prefill_tokens_per_s=prefill_tokens_per_s)


def _non_negative(matrix: Any, target: Any) -> Any:
    """Solve least squares without negative parts: drop the most negative part and repeat."""
    scale = np.maximum(1e-12, np.abs(matrix).max(axis=0))
    used = [int(i) for i in np.flatnonzero(matrix.any(axis=0))]
    parts = np.zeros(matrix.shape[1])
    while used:
        solution, *_ = np.linalg.lstsq(matrix[:, used] / scale[used], target, rcond=1e-9)
        worst = int(np.argmin(solution))
        if solution[worst] >= 0:
            parts[used] = solution / scale[used]
            break
        used.pop(worst)
    return parts


def powers(rate: float, count: int = 64) -> tuple[float, ...]:
    """Return acceptance rates by position that fall by the same factor each."""
    return tuple(rate ** (i + 1) for i in range(count))


@dataclass(frozen=True, slots=True)
class Drafting:
    """Acceptance rates of the drafters."""

    rates: dict[str, tuple[Share, ...]]
    """Share of drafts accepted at least up to each position, by drafter."""
    power: Amount = 1.0
    """Power of EAGLE-3's rates: 1 as measured, more for a drafter that lags behind the policy."""

    def rate(self, drafter: str, position: int) -> float:
        rates = self.rates.get(drafter, ())
        if not rates:
            return 0.0
        power = 1.0 if drafter == "ngram" else self.power
        if position < len(rates):
            return float(rates[position] ** power)
        # Beyond the measured positions, rates fall by the factor of the last two.
        last = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] > 0 else rates[-1]
        return float((rates[-1] * last ** (position - len(rates) + 1)) ** power)

    def tokens(self, arm: Arm) -> float:
        """Return the expected tokens per request of one engine step."""
        return 1.0 + sum(self.rate(arm.drafter, i) for i in range(arm.num_draft_tokens))

    def at(self, power: float) -> Drafting:
        return Drafting(self.rates, power)
