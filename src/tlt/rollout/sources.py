"""The source of each request's draft in an arm that mixes two: the history, or the draft model.

The arm `mixed:K` drafts K tokens with EAGLE-3, and replaces the drafts of requests whose text
continues as the history of samples expects. How well the history drafts shows in the match that a
lookup found: the more tokens of the response match, the more of the next ones will. So matches fall
into cells by scope and length. In every cell, `Sources` counts how often each place of the drafts
of either source was right, and compares the two.

Every engine step tells about both sources, because both drafts are known and the policy's tokens
come anyway: no trial is needed. The more tokens are likely to be accepted, the longer a draft from
the history may be; it costs no pass of the draft model.

A draft token that is accepted with a chance below the `price` is not worth the verification. The
price comes from the strategy: seconds per verified token times tokens per second.

The choice depends on tokens that are committed, on the history, and on earlier drafts. It never
depends on the logits or draws that will verify the drafts. Everything is deterministic, so
tensor-parallel ranks choose alike.

Shapes: B requests, K places in the draft, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tlt.vllm.v1.draft_noise import made_for

BOUNDS = (1, 2, 4, 6, 8, 12, 20)
"""Matching tokens from which on a match falls into the next cell of its scope."""
NUM_CELLS = 2 * (len(BOUNDS) + 1)
LONG = 6
"""Matching tokens from which on the history drafts until drafts were compared."""
PRICE = 0.2
"""Chance of acceptance that is worth the verification of a token, unless a strategy knows it."""


class _Chances:
    """For each cell and place, the chance of a source's token to be right if all earlier are."""

    WINDOW = 400.0
    """Drafts of a cell that the counts remember."""
    PRIOR_WEIGHT = 8.0
    """Drafts that the prior counts for."""

    def __init__(self, prior_C: Any, num_places: int) -> None:
        self._prior_C = prior_C
        self._reached_CK = np.zeros((NUM_CELLS, num_places))
        self._right_CK = np.zeros((NUM_CELLS, num_places))
        self.survival_CK = np.zeros((NUM_CELLS, num_places))
        """Chance that a draft is right up to each place."""
        self._update()

    def observe(self, cell_B: Any, drafted_BK: Any, drawn_BK: Any) -> None:
        """Learn from the policy's tokens; -1 stands where there is no token or draft.

        After the first token that differs from the draft, the source had another text in mind.
        """
        num_places = min(drafted_BK.shape[1], drawn_BK.shape[1])
        drafted_BK, drawn_BK = drafted_BK[:, :num_places], drawn_BK[:, :num_places]
        is_right_BK = (drafted_BK == drawn_BK) & (drawn_BK >= 0)
        up_to_BK = np.logical_and.accumulate(is_right_BK, axis=1)
        counts_BK = (drafted_BK >= 0) & (drawn_BK >= 0)
        counts_BK[:, 1:] &= up_to_BK[:, :-1]
        keep_C1 = np.exp(-np.bincount(cell_B, minlength=NUM_CELLS) / self.WINDOW)[:, None]
        self._reached_CK *= keep_C1
        self._right_CK *= keep_C1
        np.add.at(self._reached_CK[:, :num_places], cell_B, counts_BK)
        np.add.at(self._right_CK[:, :num_places], cell_B, counts_BK & is_right_BK)
        self._update()

    def _update(self) -> None:
        """Compute the chances; an unknown place has the chance of the place before it."""
        chance_C, survival_C = self._prior_C, np.ones(NUM_CELLS)
        for place in range(self.survival_CK.shape[1]):
            right_C = self._right_CK[:, place] + self.PRIOR_WEIGHT * chance_C
            chance_C = right_C / (self._reached_CK[:, place] + self.PRIOR_WEIGHT)
            survival_C = survival_C * chance_C
            self.survival_CK[:, place] = survival_C


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The drafts of one engine step by both sources."""

    row_of: dict[str, int]
    position_B: Any
    """Place of the first draft token in each text."""
    cell_B: Any
    history_BK: Any
    model_BK: Any


class Sources:
    """Chooses the source of every draft, and learns from what the policy drew instead."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        """Longest draft that the engine can verify."""
        self.price = PRICE
        """Chance of acceptance that is worth the verification of a token."""
        longest = np.tile([*(bound - 1 for bound in BOUNDS), BOUNDS[-1]], 2)
        self._history = _Chances(np.where(longest < LONG, 0.3, 0.8), num_places)
        self._model = _Chances(np.full(NUM_CELLS, 0.7), num_places)
        self._drafts: _Drafts | None = None

    def choose(self, match_B2: Any, num_found_B: Any, num_model: int, most: int) -> Any:
        """Return the length of each request's draft from the history; 0 leaves it to the model.

        `match_B2` and `num_found_B` say what a lookup has found, `num_model` is the length of the
        model's drafts, and `most` the length that no draft from the history may exceed.
        """
        worth_CK = self._history.survival_CK[:, :most] - self.price
        length_C = (worth_CK > 0).sum(1)  # survival falls from place to place
        value_CK = np.cumsum(worth_CK, axis=1)
        value_C = (self._model.survival_CK[:, :num_model] - self.price).sum(1)
        cell_B = _cells(match_B2)
        length_B = np.minimum(length_C[cell_B], num_found_B)
        value_B = value_CK[cell_B, np.maximum(length_B, 1) - 1]
        is_better_B = (length_B > 0) & (match_B2[:, 0] >= 0) & (value_B > value_C[cell_B])
        return np.where(is_better_B, length_B, 0)

    def begin(
        self,
        names: Sequence[str],
        position_B: Any,
        match_B2: Any,
        history: Sequence[Sequence[int]],
        model_BK: Any,
    ) -> None:
        """Remember the drafts of some requests; `position_B` is the place of their next token.

        `names` are empty for requests that get no draft. `model_BK` has no column where the draft
        model did not run, or its drafts come later (`add_model`).
        """
        row_of = {
            name: row
            for row, name in enumerate(names)
            if name and match_B2[row, 0] >= 0 and history[row]
        }
        history_BK: Any = np.full((len(names), self.num_places), -1, dtype=np.int64)
        for row, tokens in enumerate(history):
            history_BK[row, : len(tokens)] = tokens
        self._drafts = _Drafts(row_of, position_B, _cells(match_B2), history_BK, model_BK)

    @property
    def is_waiting(self) -> bool:
        """Whether drafts have not been compared yet."""
        return self._drafts is not None

    def add_model(self, model_BK: Any) -> None:
        """Add the drafts of the draft model to those that wait."""
        if self._drafts is not None:
            self._drafts = replace(self._drafts, model_BK=model_BK)

    def places(self, names: Sequence[str], otherwise_B: Any) -> Any:
        """Return the place of each request's first draft token, or another one without a draft."""
        drafts = self._drafts
        rows = [-1 if drafts is None else drafts.row_of.get(name, -1) for name in names]
        return np.array(
            [
                place if drafts is None or row < 0 else drafts.position_B[row]
                for row, place in zip(rows, otherwise_B, strict=True)
            ]
        )

    def verified(self, names: Sequence[str], position_B: Any, drawn_BK: Any) -> None:
        """Learn from the policy's tokens at the places from `position_B` on; -1 where it has none.

        Drafts count if they were made for just these places.
        """
        drafts, self._drafts = self._drafts, None
        if drafts is None:
            return
        before, now = made_for(drafts.row_of, drafts.position_B, names, position_B)
        if now:
            cell_B, drawn_BK = drafts.cell_B[before], drawn_BK[now]
            self._history.observe(cell_B, drafts.history_BK[before], drawn_BK)
            if drafts.model_BK.shape[1]:
                self._model.observe(cell_B, drafts.model_BK[before], drawn_BK)


def _cells(match_B2: Any) -> Any:
    """Return the cell of each match; that of a request without one does not matter."""
    in_prompt_B = match_B2[:, 0] == 0
    return np.searchsorted(BOUNDS, match_B2[:, 1], "right") + in_prompt_B * (len(BOUNDS) + 1)
