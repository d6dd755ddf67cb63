"""Drafts drawn with the noise of the request, and how much of the noise they are drawn with.

A draft is accepted if it equals the policy's draw, `argmax(log p + g)`. The noise g (`keyed`) is
known before the draft is made. So a drafter with the probabilities q drafts
`argmax(log q + level * g)`:

- Level 1 is the policy's own rule. It is best if q is close to p: then both draws agree, however
  many tokens are likely.
- Level 0 is the likeliest token. It is best if the policy is sure of a token that the drafter can
  only guess: then noise moves the draft, but not the policy's draw.

The best level depends on the policy, the drafter, the temperature and the place in the draft. Every
verified draft tells about all levels, because the candidates of all levels are known. So nothing
has to be tried out: each place in the draft uses the level that was right most often lately.

The policy's draw does not depend on drafts, so that no level changes any sample.

Shapes: L levels, B requests, K places in the draft, D tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlt.vllm import keyed

LEVELS = (1.0, 0.5, 0.0)
"""Shares of the noise. The first one is used until another one is better."""


class NoiseLevels:
    """Counts, for each place in the draft, how often each level was right."""

    WINDOW = 400.0
    """Verified drafts that the counts remember."""

    def __init__(self, num_places: int) -> None:
        self._right_LK = np.zeros((len(LEVELS), num_places))

    def best(self, place: int) -> int:
        """Return the index of the level to draft with at a place."""
        return int(self._right_LK[:, place].argmax())

    def observe(self, candidate_LBK: Any, drafted_BK: Any, drawn_BK: Any) -> None:
        """Learn from verified drafts.

        `drawn_BK` has the policy's tokens. After the first one that differs from the draft, the
        drafter had another text in mind, and its candidates do not count.
        """
        num_places = min(drafted_BK.shape[1], drawn_BK.shape[1])
        drawn_BK = drawn_BK[:, :num_places]
        missed_BK = drafted_BK[:, :num_places] != drawn_BK
        counts_BK = missed_BK.cumsum(1) == missed_BK
        right_LBK = (candidate_LBK[:, :, :num_places] == drawn_BK) & counts_BK
        self._right_LK *= np.exp(-len(drawn_BK) / self.WINDOW)
        self._right_LK[:, :num_places] += right_LBK.sum(1)


@dataclass(slots=True)
class _Drafts:
    """The drafts of one engine step."""

    row_of: dict[str, int]
    key_B: Any
    position_B: Any
    """Place of the first draft token in each response."""
    inverse_B: Any
    candidates: list[Any] = field(default_factory=list)
    """Tokens [L, B] of each place."""
    drafted: list[Any] = field(default_factory=list)
    """Tokens [B] of each place."""


class NoisyDrafts:
    """Draws the drafts of an engine, place by place, and learns from their verification."""

    def __init__(self, num_places: int, vocab_size: int) -> None:
        self.levels = NoiseLevels(num_places)
        self._num_blocks = (vocab_size + keyed.BLOCK - 1) // keyed.BLOCK
        self._drafts: _Drafts | None = None

    def begin(self, names: Sequence[str], key_B: Any, position_B: Any, inverse_B: Any) -> None:
        """Begin the drafts of some requests; `position_B` is the place of their next token.

        `inverse_B` is 1 / temperature; 0 drafts the likeliest token.
        """
        row_of = {name: row for row, name in enumerate(names)}
        self._drafts = _Drafts(row_of, key_B, position_B, inverse_B)

    def draw(self, logits_BD: Any, token_D: Any) -> Any:
        """Return the draft token of each request for the next place [B].

        `token_D` has the policy's token of each of the drafter's.
        """
        drafts = self._drafts
        assert drafts is not None
        place = len(drafts.drafted)
        candidate_LB = np.stack([self._at_level(logits_BD, token_D, level) for level in LEVELS])
        drafts.candidates.append(candidate_LB)
        drafts.drafted.append(candidate_LB[self.levels.best(place)])
        return drafts.drafted[-1]

    def _at_level(self, logits_BD: Any, token_D: Any, level: float) -> Any:
        drafts = self._drafts
        assert drafts is not None
        if level == 0:
            return token_D[logits_BD.argmax(-1)]
        return keyed.draw_drafts(
            logits_BD,
            token_D,
            drafts.key_B,
            drafts.position_B + len(drafts.drafted),
            drafts.inverse_B / np.float32(level),
            self._num_blocks,
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
            self.levels.observe(
                np.stack(drafts.candidates, -1)[:, before],
                np.stack(drafts.drafted, -1)[before],
                drawn_BK[now],
            )


def made_for(
    row_of: Mapping[str, int], drafted_B: Any, names: Sequence[str], position_B: Any
) -> tuple[list[int], list[int]]:
    """Return the rows of drafts that were made for just these places, and the rows of the names.

    `row_of` and `drafted_B` have the rows and the places of the drafts.
    """
    known = [
        (row, now)
        for now, name in enumerate(names)
        if (row := row_of.get(name, -1)) >= 0 and drafted_B[row] == position_B[now]
    ]
    return [row for row, _ in known], [now for _, now in known]
