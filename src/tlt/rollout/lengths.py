"""How long responses will be, by prompt.

A response is expected to be as long as those of its prompt in the last epoch, and at least as long
as a sibling that has ended or still runs. The forecast decides when and where a request runs, never
what is sampled: a wrong forecast costs time only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping

from tlt.contracts import SampleRequest

MAX_PROMPTS = 200_000
"""Prompts of earlier rollouts to remember; about 20 MB."""


def prompt_key(request: SampleRequest) -> str:
    """Return a name for the request's prompt that is the same in every process."""
    tokens = array("q", request.prompt_token_ids).tobytes()
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()


class LengthForecast:
    """Expected lengths of responses. `state` is what a run that resumes needs."""

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._past: dict[str, int] = {}
        """Length that four of five earlier responses did not exceed, by prompt, oldest first."""
        self._ended: dict[str, list[int]] = {}
        """Lengths of this rollout's responses, by prompt."""
        self._longest: dict[str, int] = {}
        """Longest response of this rollout so far, by prompt, running ones included."""

    def expected(self, prompt: str) -> int | None:
        """Return the tokens to expect of a response to this prompt; None if nothing is known."""
        past, now = self._past.get(prompt), self._longest.get(prompt)
        return past if now is None else max(now, past or 0)

    def runs(self, prompt: str, tokens: int) -> None:
        """Note that a response has so many tokens, and goes on."""
        self._longest[prompt] = max(tokens, self._longest.get(prompt, 0))

    def ended(self, prompt: str, tokens: int) -> None:
        """Note the length of a response that has ended."""
        self.runs(prompt, tokens)
        self._ended.setdefault(prompt, []).append(tokens)

    def rollout_ended(self) -> None:
        """Remember this rollout for the next epoch, and forget the oldest prompts."""
        for prompt, lengths in self._ended.items():
            self._past.pop(prompt, None)
            self._past[prompt] = sorted(lengths)[len(lengths) * 4 // 5]
        while len(self._past) > self._max_prompts:
            del self._past[next(iter(self._past))]
        self._ended.clear()
        self._longest.clear()

    def state(self) -> dict[str, int]:
        """Return the lengths of earlier rollouts, by prompt."""
        return dict(self._past)

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from the state of an earlier process."""
        self._past = dict(state)
