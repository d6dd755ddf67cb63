"""The draws of a recheck against the tokens expected (`tlt.rollout.recheck`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlt.vllm import keyed
from tlt.vllm.v1.sampler import Keys


class DrawMargins:
    """Notes by how much an expected token missed the draw, as long as the sampler runs for it.

    Only the first difference matters: the text differs after it, and so do the distributions.
    """

    def __init__(self, keys: Keys, expected: Sequence[int]) -> None:
        self._keys = keys
        self._expected = expected
        self._missed: dict[int, float] = {}
        keys.watch = self._drawn

    def _drawn(self, logits: Any, tokens: Any, keys: Any, positions: Any, inverse: Any) -> None:
        """Compare the draw of the only request in the batch; a recheck has no drafts."""
        position = int(positions[0])
        expected = self._expected[position]
        # A draw while a part of the prompt is still to come is drawn again.
        self._missed.pop(position, None)
        if expected != tokens[0, 0] and not self._missed:
            short = keyed.shortfall(logits[0], keys[0], position, inverse[0], expected)
            self._missed[position] = short

    def end(self) -> dict[int, float]:
        """Leave the sampler alone again; return the shortfall by position."""
        self._keys.watch = None
        return self._missed
