"""Look-ahead: idle engines generate samples of the next RL step, and the texts become drafts.

A sample's noise follows from its seed (`keyed`), and prompts of the next RL step are known. So an
engine that has nothing left to generate can draw the next RL step's samples with the present
policy. After the update the new policy draws the same tokens again, up to the place where the
update moved a draw. The text is never a sample: the engine that generates the sample gets the text
as a draft (`texts.Lesson`), and the new policy verifies it.

Where harvest uses idle time too, look-ahead takes the first part of an engine's idle spell, and
harvest the rest: agreement x usual length of a spell. Agreement is the share of the generated
tokens that samples repeated up to the first difference. So look-ahead gives its time to harvest
where updates move the policy far.

Pure: `LookAhead` decides what to generate ahead, for how long, and who gets the texts.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tlt.contracts import Sample, SampleRequest
from tlt.rollout.lengths import LengthForecast, prompt_key
from tlt.rollout.texts import Lesson

PREFIX = "ahead/"
"""Begin of the name of a request that is generated ahead."""
MAX_TOKENS = 16_000_000
"""Tokens of texts to keep, 64 MB; engines generate no more of them ahead."""
RECENT = 16
"""Idle spells, and RL steps with texts, from which the next ones are expected."""
SHARE_OF_LONGEST = 0.5
"""Requests must be expected to be this long, relative to the longest, to be generated beside it."""
FIRST_AGREEMENT = 0.5
"""Agreement to expect before any was measured."""
MIN_AGREEMENT = 0.05
"""Agreement to reckon with at least, so that look-ahead notices when updates become smaller."""
FIRST_S = 5.0
"""Length of an idle spell to expect before any has ended."""


@dataclass(frozen=True, slots=True)
class AheadText:
    """A response that an engine generated ahead, whole or up to where it was aborted."""

    name: str
    """Name of the request that was generated ahead."""
    tokens: array[int]


def common_length(text: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens up to the first difference."""
    for place, (one, two) in enumerate(zip(text, other, strict=False)):
        if one != two:
            return place
    return min(len(text), len(other))


class LookAhead:
    """Requests to generate ahead, and their texts until the samples have ended."""

    def __init__(
        self, forecast: LengthForecast, clock: Callable[[], float], max_tokens: int = MAX_TOKENS
    ) -> None:
        self._forecast = forecast
        self._clock = clock
        self._max_tokens = max_tokens
        self._due: deque[SampleRequest] = deque()
        """Samples of the next RL step that no engine generates ahead yet."""
        self._given: dict[str, SampleRequest] = {}
        """Samples that engines generate ahead, by the names of the requests."""
        self._texts: dict[str, array[int]] = {}
        """Texts by the names of their samples."""
        self._num_tokens = 0
        self._idle_since_s: dict[str, float] = {}
        """Engines that are idle in this rollout, and since when."""
        self._spells_s: deque[float] = deque(maxlen=RECENT)
        """Lengths of the last idle spells."""
        self._agreed: deque[tuple[int, int]] = deque(maxlen=RECENT)
        """Repeated tokens, and all tokens of texts, in the last RL steps that had texts."""
        self._repeated = self._compared = 0
        """The same of this rollout."""
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._made = self._made_tokens = self._engine_s = 0.0
        self._last: tuple[int, int] = 0, 0

    # --- what to generate ahead ---------------------------------------------------------------

    def plan(self, requests: Iterable[SampleRequest]) -> None:
        """Note the samples of the next RL step, in the order of dispatch.

        The longest come first, as far as the forecast knows.
        """
        self._due = deque(sorted(requests, key=self._expected, reverse=True))
        self._given.clear()

    def _expected(self, request: SampleRequest) -> int:
        limit = request.sampling.max_tokens
        if request.sampling.ignore_eos:
            return limit
        known = self._forecast.expected(prompt_key(request))
        return limit if known is None else min(known, limit)

    def next(self, count: int, beside: Iterable[SampleRequest] = ()) -> list[SampleRequest]:
        """Return requests for an engine to generate ahead, at most `count`.

        The longest responses decide when a rollout ends, and few requests get further in the same
        time. So requests that are expected to be less than half as long as the longest of their
        engine wait, or go to another engine. `beside` are the requests that the engine generates.
        """
        taken: list[SampleRequest] = []
        known = [*beside, *itertools.islice(self._due, 1)]
        least = SHARE_OF_LONGEST * max(map(self._expected, known), default=0)
        while self._due and len(taken) < count and self._num_tokens < self._max_tokens:
            if self._expected(self._due[0]) < least:
                break
            request = self._due.popleft()
            if request.sampling.seed is not None:
                taken.append(_ahead(request))
                self._given[taken[-1].sample_id] = request
        return taken

    def turn_ended(self, requests: Iterable[SampleRequest]) -> None:
        """Leave those of the requests to other engines that have no text: they never began."""
        for request in reversed(list(requests)):
            if (sample := self._given.pop(request.sample_id, None)) is not None:
                self._due.appendleft(sample)

    def rollout_started(self, requests: Iterable[SampleRequest]) -> None:
        """Drop the texts of samples that will not be generated; evaluations change nothing."""
        names = {r.sample_id for r in requests if r.rl_step is not None}
        if names:
            self._due = deque(r for r in self._due if r.sample_id not in names)
            for name in self._texts.keys() - names:
                self._take(name)

    def rollout_ended(self) -> None:
        """Generate nothing more ahead until the next plan."""
        self._due.clear()
        self._given.clear()
        for name in list(self._idle_since_s):
            self.needed(name)
        if self._compared:
            self._last = self._repeated, self._compared
            self._agreed.append(self._last)
            self._repeated = self._compared = 0

    # --- for how long -------------------------------------------------------------------------

    def idle(self, engine: str) -> None:
        """Note that an engine is idle, unless it has been already."""
        self._idle_since_s.setdefault(engine, self._clock())

    def needed(self, engine: str) -> None:
        """Note that an engine is no longer idle."""
        since_s = self._idle_since_s.pop(engine, None)
        if since_s is not None:
            self._spells_s.append(self._clock() - since_s)

    @property
    def agreement(self) -> float:
        """Share of the tokens generated ahead that samples lately repeated."""
        repeated = sum(repeated for repeated, _ in self._agreed)
        compared = sum(compared for _, compared in self._agreed)
        return repeated / compared if compared else FIRST_AGREEMENT

    def seconds_left(self, engine: str) -> float:
        """Return for how long an idle engine should look ahead before harvest gets its time."""
        usual_s = median(self._spells_s) if self._spells_s else FIRST_S
        spent_s = self._clock() - self._idle_since_s.get(engine, self._clock())
        return max(self.agreement, MIN_AGREEMENT) * usual_s - spent_s

    # --- texts --------------------------------------------------------------------------------

    def ended(self, texts: Iterable[AheadText], engine_s: float) -> None:
        """Keep texts that an engine generated ahead, in so many seconds."""
        self._engine_s += engine_s
        for text in texts:
            name = text.name.removeprefix(PREFIX)
            if text.tokens and name not in self._texts:
                self._given.pop(text.name, None)
                self._texts[name] = text.tokens
                self._num_tokens += len(text.tokens)
                self._made += 1
                self._made_tokens += len(text.tokens)

    def lessons(self, requests: Iterable[SampleRequest]) -> list[Lesson]:
        """Return the texts of these samples, for the engine that generates them."""
        return [
            Lesson(r.prompt_token_ids, self._texts[r.sample_id], sample_id=r.sample_id)
            for r in requests
            if r.sample_id in self._texts
        ]

    def finished(self, sample: Sample) -> None:
        """Compare a finished sample with its text, which is not needed any more."""
        if (text := self._take(sample.sample_id)) is not None:
            self._repeated += common_length(text, sample.token_ids)
            self._compared += len(text)

    def _take(self, name: str) -> array[int] | None:
        text = self._texts.pop(name, None)
        self._num_tokens -= len(text or ())
        return text

    def record(self) -> dict[str, float]:
        """Return the counts since the last call."""
        counts = {
            "ahead/texts": self._made,
            "ahead/tokens": self._made_tokens,
            "ahead/engine_s": self._engine_s,
        }
        repeated, compared = self._last
        if compared:
            counts["ahead/repeated_share"] = repeated / compared
        self._forget_counts()
        return counts


def _ahead(request: SampleRequest) -> SampleRequest:
    """Return the request under another name, without what only a sample needs."""
    sampling = replace(request.sampling, logprobs=False)
    return SampleRequest(PREFIX + request.sample_id, request.prompt_token_ids, sampling)
