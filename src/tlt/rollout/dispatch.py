"""The pool's decisions about which engine generates what, without engines, clocks or I/O.

Requests wait in one queue, first come, first served. The next one goes to the engine that it
prefers, if that has a free slot, else to the least loaded one. An engine holds at most one running
request per slot, plus a few prefetched requests, which hide the latency of a submission. When the
queue is empty, the dispatcher recalls requests that wait behind a loaded engine's slots for an
engine with a free slot. Work per event is O(log engines).

Every sample has one owner at a time, and only its owner can finish it. A lost engine's samples go
back to the front of the queue, with their known text. So the pool delivers each submitted sample
exactly once.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tlt.contracts import SampleRequest, Text
from tlt.errors import EngineError

CONTINUED_ATTEMPTS = 2
"""Attempts after which a sample's text is no longer continued: it may be what kills engines."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Send these requests to the engine."""

    engine: str
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the engine for requests that have not started; answer with `Dispatcher.recalled`."""

    engine: str
    sample_ids: tuple[str, ...]


@dataclass(eq=False, slots=True)
class _Work:
    """A sample that is not finished."""

    request: SampleRequest
    attempts: int = 0
    owner: str | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """The known part of the response."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    policy_version: int = 0
    """Version of the policy that drew it."""

    def gained(self, place: int, text: Text) -> None:
        """Note that the response continues at a place; what does not fit is left out."""
        if place == 0:  # an engine may have started again
            self.keep(0)
        if place == len(self.token_ids):
            self.token_ids.extend(text.token_ids)
            self.logprobs.extend(text.logprobs)
            self.policy_version = text.policy_version

    def keep(self, size: int) -> None:
        """Begin the next attempt with the first `size` tokens of the response."""
        size = max(0, size)
        del self.token_ids[size:], self.logprobs[size:]
        begun = Text(tuple(self.token_ids), tuple(self.logprobs), self.policy_version)
        self.request = replace(self.request, begun=begun if size else None)


@dataclass(slots=True)
class EngineLoad:
    """The requests that an engine holds."""

    name: str
    slots: int
    works: dict[str, _Work] = field(default_factory=dict)
    """Unfinished samples by id, in the order in which the engine got them."""
    recalling: bool = False
    recalled_in_vain: bool = False
    """The last recall brought nothing back, and nothing has happened to the engine since."""
    stamp: int = 0
    """Number of changes of this engine; heap entries with another number are stale."""

    @property
    def num_waiting(self) -> int:
        """Requests behind the slots."""
        return max(len(self.works) - self.slots, 0)


class Dispatcher:
    """Turns events into actions: report each event, then carry out all `actions()`."""

    def __init__(self, prefetch: int, max_attempts: int = 5) -> None:
        self._prefetch = prefetch
        self._max_attempts = max_attempts
        self._engines: dict[str, EngineLoad] = {}
        self._unfinished: dict[str, _Work] = {}
        self._queue: deque[_Work] = deque()
        self._count = itertools.count()
        # Lazy heaps of (key, tie-break, stamp, engine name).
        self._with_free_slot: list[tuple[int, int, int, str]] = []
        self._with_room: list[tuple[int, int, int, str]] = []
        self._with_waiting: list[tuple[int, int, int, str]] = []

    # --- events -------------------------------------------------------------------------------

    def submit(self, requests: Iterable[SampleRequest]) -> None:
        """Queue requests."""
        for request in requests:
            if request.sample_id in self._unfinished:
                raise ValueError(f"sample {request.sample_id!r} is already being generated")
            self._unfinished[request.sample_id] = work = _Work(request)
            self._queue.append(work)

    def engine_ready(self, name: str, slots: int) -> None:
        """Add an engine that runs `slots` requests at once."""
        assert name not in self._engines, f"engine {name} is already here"
        self._engines[name] = EngineLoad(name, slots)
        self._changed(self._engines[name])

    def gained(self, name: str, texts: Iterable[tuple[str, int, Text]]) -> None:
        """Note what running samples have gained, to continue them if their engine is lost."""
        for sample_id, place, text in texts:
            if self._owned(sample_id, name):
                self._unfinished[sample_id].gained(place, text)

    def engine_lost(self, name: str, keep_texts: bool = False) -> dict[str, int]:
        """Remove an engine, and requeue all of its samples.

        Return the samples, and how many tokens of each one need not be drawn again: none, unless
        the texts are kept.
        """
        engine = self._engines.pop(name, None)
        if engine is None:
            return {}
        for work in reversed(engine.works.values()):
            # The last known token may be the response's end; the next engine draws it again.
            trusted = keep_texts and work.attempts <= CONTINUED_ATTEMPTS
            work.keep(len(work.token_ids) - 1 if trusted else 0)
            self._requeue(work)
        return {sample_id: len(work.token_ids) for sample_id, work in engine.works.items()}

    def finished(self, name: str, sample_ids: Iterable[str]) -> list[str]:
        """Note finished samples; return their ids without unknown and repeated ones."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        ended = [sample_id for sample_id in sample_ids if self._owned(sample_id, name)]
        for sample_id in ended:
            del engine.works[sample_id], self._unfinished[sample_id]
        engine.recalled_in_vain = False
        self._changed(engine)
        return ended

    def failed(self, name: str, sample_ids: Iterable[str]) -> list[str]:
        """Requeue samples that the engine broke off, and return their ids."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        again = [sample_id for sample_id in sample_ids if self._owned(sample_id, name)]
        for sample_id in again:
            work = engine.works.pop(sample_id)
            work.keep(0)
            self._requeue(work)
        self._changed(engine)
        return again

    def arrived(self, name: str) -> None:
        """Note that the engine holds the requests it was sent, and can give them back."""
        if (engine := self._engines.get(name)) is not None and engine.recalled_in_vain:
            engine.recalled_in_vain = False
            self._changed(engine)

    def recalled(self, name: str, sample_ids: Sequence[str]) -> None:
        """Requeue samples that the engine gave back after a recall."""
        engine = self._engines.get(name)
        if engine is None:
            return  # lost meanwhile: its samples are already back in the queue
        engine.recalling = False
        engine.recalled_in_vain = not sample_ids
        for sample_id in reversed(sample_ids):
            if self._owned(sample_id, name):
                work = engine.works.pop(sample_id)
                work.attempts -= 1  # the sample never started
                self._requeue(work)
        self._changed(engine)

    # --- decisions ----------------------------------------------------------------------------

    def actions(self) -> list[Assign | Recall]:
        """Return what to do now. Call it after every event, and carry out every action."""
        assigned: dict[str, list[SampleRequest]] = {}
        while self._queue:
            engine = (
                self._preferred(self._queue[0].request)
                or self._pop(self._with_free_slot)
                or self._pop(self._with_room)
            )
            if engine is None:
                break
            work = self._queue.popleft()
            work.owner = engine.name
            work.attempts += 1
            engine.works[work.request.sample_id] = work
            self._changed(engine)
            assigned.setdefault(engine.name, []).append(work.request)
        actions: list[Assign | Recall] = [
            Assign(name, tuple(requests)) for name, requests in assigned.items()
        ]
        if not self._queue:
            actions.extend(self._recalls())
        return actions

    def _preferred(self, request: SampleRequest) -> EngineLoad | None:
        """Return the engine that has the request's prompt in its cache, if it has a free slot."""
        engine = self._engines.get(request.prefers) if request.prefers else None
        return engine if engine and len(engine.works) < engine.slots else None

    def _recalls(self) -> list[Recall]:
        """Recall as many waiting requests as other engines have free slots."""
        recalls = []
        idle_engines = []
        wanted = 0
        while (loaded := self._pop(self._with_waiting)) is not None:
            if wanted == 0:
                idle = self._pop(self._with_free_slot)
                if idle is None:
                    self._changed(loaded)
                    break
                idle_engines.append(idle)
                wanted = idle.slots - len(idle.works)
            count = min(wanted, loaded.num_waiting)
            wanted -= count
            # The requests given last are at the end of the engine's queue.
            ids = tuple(itertools.islice(reversed(loaded.works), count))
            loaded.recalling = True
            self._changed(loaded)
            recalls.append(Recall(loaded.name, ids))
        for engine in idle_engines:
            self._changed(engine)
        return recalls

    # --- state --------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that no engine holds."""
        return len(self._queue)

    @property
    def num_unfinished(self) -> int:
        """Requests that are queued or held by an engine."""
        return len(self._unfinished)

    def outstanding(self, name: str) -> int:
        """Return the number of requests that an engine holds."""
        return len(self._engines[name].works)

    def held_by(self, name: str) -> set[str]:
        """Return the requests that an engine holds, as far as the pool knows."""
        return set(self._engines[name].works)

    # --- bookkeeping --------------------------------------------------------------------------

    def _owned(self, sample_id: str, name: str) -> bool:
        return sample_id in self._unfinished and self._unfinished[sample_id].owner == name

    def _requeue(self, work: _Work) -> None:
        request = work.request
        work.owner = None
        if work.attempts >= self._max_attempts:
            raise EngineError(
                f"sample {request.sample_id!r} was on {self._max_attempts} engines that were lost "
                f"or broke it off; its prompt ({len(request.prompt_token_ids)} tokens) may be the "
                "cause"
            )
        self._queue.appendleft(work)

    def _changed(self, engine: EngineLoad) -> None:
        """Push a new entry for the engine onto every heap it now belongs to."""
        engine.stamp += 1
        load = len(engine.works)
        entry = (load, next(self._count), engine.stamp, engine.name)
        if load < engine.slots:
            heapq.heappush(self._with_free_slot, entry)
        elif load < engine.slots + self._prefetch:
            heapq.heappush(self._with_room, entry)
        if engine.num_waiting and not (engine.recalling or engine.recalled_in_vain):
            heapq.heappush(self._with_waiting, (-engine.num_waiting, *entry[1:]))

    def _pop(self, heap: list[tuple[int, int, int, str]]) -> EngineLoad | None:
        """Pop the first engine, and drop stale entries. The caller must call `_changed` for it."""
        while heap:
            _, _, stamp, name = heapq.heappop(heap)
            engine = self._engines.get(name)
            if engine is not None and engine.stamp == stamp:
                return engine
        return None
