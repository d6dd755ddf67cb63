"""Responses by prompt, which n-gram drafters of other engines, epochs and runs learn from.

Samples of one prompt share wording, but an engine knows only those that it generated itself. So the
pool hands responses to the other engines that have requests of their prompt, running ones part by
part, and the newest responses of a prompt to every engine that gets its first request of it. A text
is a source of drafts, which the policy verifies: a wrong, old or missing text costs acceptance and
nothing else.

Pure: `Texts` decides which engine should learn what, in bounded memory; `teacher` carries it out.
`Inbox` is the engine's end.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tlt.contracts import Sample, SampleRequest
from tlt.rollout.lengths import prompt_key

KEPT = 4
"""Responses to keep for a prompt, the newest."""
PART_TOKENS = 64
"""New tokens of a running response that are worth handing over."""
OVERLAP = 16
"""Tokens that a part of a response repeats of the part before, so that matches cross the border."""
PROMPT_BYTES = 500
"""Memory of a prompt besides the tokens of its responses."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A response or a part of it, for an engine to learn n-grams from."""

    prompt_token_ids: tuple[int, ...]
    response: array[int]
    start: int = 0
    """Place of the first token in the whole response."""
    sample_id: str = ""
    """Sample that this text was generated ahead for (`ahead`): it begins with the same tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.response)


class Texts:
    """The newest responses of recent prompts, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, deque[array[int]]] = {}
        """Responses by prompt, the prompt of the oldest response first."""
        self._num_bytes = 0
        self._learners: set[str] = set()
        """Engines that draft n-grams from a history."""
        self._requests: dict[str, tuple[str, SampleRequest]] = {}
        """Unfinished requests of this rollout, with their prompts."""
        self._engines: dict[str, set[str]] = {}
        """Learners that got a request of a prompt in this rollout."""
        self._held: dict[str, dict[str, int]] = {}
        """Requests that a learner got, with the tokens that were handed over so far."""

    @property
    def num_bytes(self) -> int:
        """Memory of the texts."""
        return self._num_bytes

    def engine_ready(self, engine: str) -> None:
        """Add an engine that learns."""
        self._learners.add(engine)

    def engine_lost(self, engine: str) -> None:
        """Remove an engine; its successor has learned nothing."""
        self._learners.discard(engine)
        self._held.pop(engine, None)
        for engines in self._engines.values():
            engines.discard(engine)

    def rollout_started(self, requests: Iterable[SampleRequest]) -> None:
        """Note the requests; texts are kept of those that are trained on."""
        if self._max_bytes and self._learners:
            self._requests |= {
                r.sample_id: (prompt_key(r), r) for r in requests if r.rl_step is not None
            }

    def assigned(self, engine: str, requests: Iterable[SampleRequest]) -> list[Lesson]:
        """Return what an engine should learn that gets these requests."""
        lessons: list[Lesson] = []
        for request in requests:
            if engine not in self._learners or request.sample_id not in self._requests:
                continue
            prompt, _ = self._requests[request.sample_id]
            self._held.setdefault(engine, {})[request.sample_id] = 0
            engines = self._engines.setdefault(prompt, set())
            if engine not in engines:
                engines.add(engine)
                kept = self._kept.get(prompt, ())
                lessons += (Lesson(request.prompt_token_ids, response) for response in kept)
        return lessons

    def finished(self, sample: Sample) -> tuple[Lesson, set[str]] | None:
        """Keep a response; return what is new of it, and the other engines that should learn it."""
        prompt, request = self._requests.pop(sample.sample_id, ("", None))
        if request is None:
            return None
        known = self._held.get(sample.engine, {}).pop(sample.sample_id, 0)
        response, start = array("i", sample.token_ids), max(0, known - OVERLAP)
        self._keep(prompt, response)
        others = self._engines.get(prompt, set()) - {sample.engine}
        return Lesson(request.prompt_token_ids, response[start:], start), others

    def wanted(self, engine: str) -> dict[str, int]:
        """Return the requests of an engine that others have siblings of, and where to go on."""
        held = self._held.get(engine, {})
        for sample_id in [name for name in held if name not in self._requests]:
            del held[sample_id]  # another engine has finished the request
        return {
            sample_id: max(0, known - OVERLAP)
            for sample_id, known in held.items()
            if self._engines.get(self._requests[sample_id][0], set()) - {engine}
        }

    def grown(
        self, engine: str, sample_id: str, start: int, tokens: array[int]
    ) -> tuple[Lesson, set[str]] | None:
        """Note tokens of a running response; return them, and who should learn them."""
        prompt, request = self._requests.get(sample_id, ("", None))
        held = self._held.get(engine, {})
        if request is None or sample_id not in held:
            return None
        held[sample_id] = start + len(tokens)
        others = self._engines.get(prompt, set()) - {engine}
        return Lesson(request.prompt_token_ids, tokens, start), others

    def _keep(self, prompt: str, response: array[int]) -> None:
        kept = self._kept.pop(prompt, None)
        if kept is None:
            kept = deque(maxlen=KEPT)
            self._num_bytes += PROMPT_BYTES
        if len(kept) == KEPT:
            self._num_bytes -= _bytes(kept[0])
        kept.append(response)
        self._num_bytes += _bytes(response)
        self._kept[prompt] = kept
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._kept))
            self._num_bytes -= PROMPT_BYTES + sum(map(_bytes, self._kept.pop(oldest)))

    def rollout_ended(self) -> None:
        """Forget which engine has which prompt."""
        self._requests.clear()
        self._engines.clear()
        self._held.clear()

    def state(self) -> bytes:
        """Return the texts, for the next process."""
        sizes = {prompt: [len(text) for text in texts] for prompt, texts in self._kept.items()}
        tokens = (text.tobytes() for texts in self._kept.values() for text in texts)
        return json.dumps(sizes).encode() + b"\n" + b"".join(tokens)

    def restore(self, state: bytes) -> None:
        """Keep the texts of an earlier process, as many as fit; raise ValueError if damaged."""
        header, _, content = state.partition(b"\n")
        tokens, sizes = array("i", content), json.loads(header)
        try:
            if sum(sum(of_prompt) for of_prompt in sizes.values()) != len(tokens):
                raise ValueError("it holds more or fewer tokens than it lists")
        except (AttributeError, TypeError) as error:
            raise ValueError("it does not begin with the lengths of responses") from error
        start = 0
        for prompt, of_prompt in sizes.items():
            for size in of_prompt:
                self._keep(prompt, tokens[start : start + size])
                start += size


class Inbox:
    """Lessons that an engine has still to learn, of about `max_tokens`; the oldest are dropped.

    Any thread may call it.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lessons: deque[Lesson] = deque()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lessons)

    def put(self, lessons: Iterable[Lesson]) -> None:
        """Add lessons, and drop the oldest ones beyond the limit."""
        with self._lock:
            for lesson in lessons:
                self._lessons.append(lesson)
                self._num_tokens += lesson.num_tokens
            while len(self._lessons) > 1 and self._num_tokens > self._max_tokens:
                self._pop()

    def take(self, max_tokens: int) -> list[Lesson]:
        """Remove and return the oldest lessons of at most `max_tokens`, or one that has more."""
        taken: list[Lesson] = []
        with self._lock:
            room = max_tokens
            while self._lessons and (not taken or self._lessons[0].num_tokens <= room):
                taken.append(self._pop())
                room -= taken[-1].num_tokens
        return taken

    def _pop(self) -> Lesson:
        lesson = self._lessons.popleft()
        self._num_tokens -= lesson.num_tokens
        return lesson


def _bytes(text: array[int]) -> int:
    return text.itemsize * len(text)
