"""Texts that requests are expected to repeat from the first token on (`tlt.rollout.ahead`).

A text is a draft by position: the tokens behind as many as the response has. It counts as long as
the response has repeated it. After the first difference the request has no text any more, and
n-grams draft, which the history knows the text by, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class _Own:
    tokens: Any
    num_repeated: int = 0
    """Tokens of the response that were compared, and are equal."""


class OwnTexts:
    """Texts of running requests, by the names of the requests."""

    def __init__(self) -> None:
        self._texts: dict[str, _Own] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._texts

    def follow(self, request_id: str, text: Any) -> None:
        """Expect a request to repeat this text, whatever it has so far."""
        self._texts[request_id] = _Own(np.asarray(text, dtype=np.int64))

    def forget(self, request_id: str) -> None:
        """Drop the text of a request, if it has one."""
        self._texts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all texts."""
        self._texts.clear()

    def draft(self, request_id: str, response: Any, num_wanted: int) -> list[int]:
        """Return the tokens that follow; none if the response has left the text, or ended it."""
        own = self._texts.get(request_id)
        if own is None:
            return []
        new = response[own.num_repeated :]
        end = own.num_repeated + len(new)
        if end >= len(own.tokens) or (own.tokens[own.num_repeated : end] != new).any():
            del self._texts[request_id]
            return []
        own.num_repeated = end
        tokens: list[int] = own.tokens[end : end + num_wanted].tolist()
        return tokens
