"""How long an engine step takes, and what it brings.

    seconds = parts . (1, rows, rows beyond what is free, context read, drafting, passes, draft
    rows)

Rows are the tokens that the policy computes in a step: one for every request and one for every
draft to verify. The parts are fitted to runs (`fit`), or come from a profile. Never negative, each
proportional to one cause: so the model speaks for batches, draft lengths and contexts that were
never measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.contracts import Arm

PARTS = ("step", "row", "dense_row", "context", "drafting", "draft_pass", "draft_row")


@dataclass(frozen=True, slots=True)
class Observation:
    """Some engine steps of the same kind."""

    arm: Arm
    running: float
    context: float
    """Tokens before the one that is computed, the mean of the requests."""
    step_s: float
    weight: float = 1.0
    """Steps, or seconds: what it counts."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Seconds of the parts of a step."""

    step: float
    """Every step: reading the weights, scheduling."""
    row: float = 0.0
    """Of every row."""
    dense_row: float = 0.0
    """Of every row beyond `free_rows`, where the hardware computes rather than reads."""
    context: float = 0.0
    """Of every token of context that a request reads."""
    drafting: float = 0.0
    """Of a step that drafts, whatever the length."""
    draft_pass: float = 0.0
    """Of every token drafted, one after the other."""
    draft_row: float = 0.0
    """Of every token drafted and request."""
    free_rows: float = 0.0
    prefill_tokens_per_s: float = 1e9

    def step_s(self, arm: Arm, running: Any, context: Any) -> Any:
        """Seconds; numbers or arrays."""
        return _features(arm, running, context, self.free_rows) @ np.array(
            [self.step, self.row, self.dense_row, self.context, self.drafting, self.draft_pass,
             self.draft_row]
        )  # fmt: skip


def _features(arm: Arm, running: Any, context: Any, free_rows: float) -> Any:
    running, context = np.broadcast_arrays(
        np.asarray(running, dtype=float), np.asarray(context, dtype=float)
    )
    length = float(arm.num_draft_tokens)
    # N-grams are looked up, not computed: nothing of theirs grows with a model.
    passes = length if arm.drafter == "eagle3" else 0.0
    rows = running * (1 + length)
    return np.stack(
        [
            np.ones_like(running),
            rows,
            np.maximum(0.0, rows - free_rows),
            running * context,
            np.full_like(running, float(length > 0)),
            np.full_like(running, passes),
            passes * running,
        ],
        axis=-1,
    )


def fit(observations: Iterable[Observation], prefill_tokens_per_s: float = 1e9) -> EngineModel:
    """The model that is least wrong, in shares of each step's time; no part is negative."""
    found = list(observations)
    if len(found) < len(PARTS):
        raise ValueError(f"{len(found)} kinds of steps are too few to fit {len(PARTS)} parts to")
    seconds = np.array([o.step_s for o in found])
    weights = np.sqrt(np.array([o.weight for o in found])) / seconds
    columns = np.concatenate(
        [_features(o.arm, o.running, o.context, 0.0)[None] for o in found], axis=0
    )
    parts = _non_negative(columns * weights[:, None], seconds * weights)
    found_parts = {name: float(part) for name, part in zip(PARTS, parts, strict=True)}
    return EngineModel(**found_parts, prefill_tokens_per_s=prefill_tokens_per_s)


def _non_negative(matrix: Any, target: Any) -> Any:
    """Least squares without negative parts: what comes out negative is left out, worst first."""
    used = [i for i in range(matrix.shape[1]) if np.abs(matrix[:, i]).max() > 0]
    scale = np.array([max(1e-12, np.abs(matrix[:, i]).max()) for i in range(matrix.shape[1])])
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
    """Acceptance by position where each position loses the same share."""
    return tuple(rate ** (i + 1) for i in range(count))


@dataclass(frozen=True, slots=True)
class Drafting:
    """How often drafts are accepted."""

    rates: dict[str, tuple[float, ...]]
    """By drafter: the share of drafts accepted at least up to each position."""
    power: float = 1.0
    """Rates are raised to it: 1 as measured, more for a drafter that has fallen behind."""

    def rate(self, drafter: str, position: int) -> float:
        rates = self.rates.get(drafter, ())
        if not rates:
            return 0.0
        if position < len(rates):
            return float(rates[position] ** self.power)
        # Beyond what was measured each position loses as much as the last one did.
        last = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] > 0 else rates[-1]
        return float((rates[-1] * last ** (position - len(rates) + 1)) ** self.power)

    def tokens(self, arm: Arm) -> float:
        """Of one request and step, expected."""
        return 1.0 + sum(self.rate(arm.drafter, i) for i in range(arm.num_draft_tokens))

    def at(self, power: float) -> Drafting:
        return Drafting(self.rates, power)
