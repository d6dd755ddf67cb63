"""The pool's decisions about which engine generates what, without engines, clocks or I/O.

Requests wait in one queue, and the least loaded engine gets the next request. With a forecast of
lengths the longest request is next, and an engine with a long request counts as more loaded: long
requests start early, and beside few others. Without a forecast requests go out as they came.

Siblings teach each other where they run on one engine (`vllm.history`). If they are to stay
together, an engine gets siblings of its own requests first, and else the first one of a new group,
as long as many requests wait. The last requests spread: a group of long responses on one engine
would hold up the rollout.

An engine holds at most as many requests as it has slots, which it runs at once, plus a few
prefetched ones, which hide the latency of a submission. When the queue is empty, the dispatcher
recalls requests that wait behind a loaded engine's slots for an engine with a free slot. Work per
event is O(log engines).

Every sample has one owner at a time, and only its owner can finish it. A lost engine's samples go
back to the front of the queue. So the pool delivers each submitted sample exactly once.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tlt.contracts import SampleRequest
from tlt.errors import EngineError
from tlt.rollout.lengths import LengthForecast, prompt_key
from tlt.rollout.work import Held, Queue, Work

APART = 4
"""Tokens of other requests that delay an engine as much as one more token of its longest request.
With a larger value, long requests have fewer others beside them."""
QUEUED = 2
"""Requests that wait for each slot of all engines, above which siblings stay together. Modelled
rollouts of 32 engines took between 2% less and 2% longer than if siblings spread; with 1 they took
up to 7% longer, with 0 up to 20%."""


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


@dataclass(slots=True)
class _Engine:
    name: str
    held: Held
    recalling: bool = False
    recalled_in_vain: bool = False
    """The last recall brought nothing back, and nothing has happened to the engine since."""
    stamp: int = 0
    """Number of changes of this engine; heap entries with another number are stale."""
    groups: dict[str, None] = field(default_factory=dict)
    """Groups of this rollout that the engine got a request of, unless none of them waits."""


class Dispatcher:
    """Turns events into actions: report each event, then carry out all `actions()`."""

    def __init__(
        self,
        prefetch: int,
        forecast: LengthForecast | None = None,
        max_attempts: int = 5,
        together: bool = False,
    ) -> None:
        self._prefetch = prefetch
        self._forecast = forecast
        self._together = together
        self._max_attempts = max_attempts
        self._engines: dict[str, _Engine] = {}
        self._unfinished: dict[str, Work] = {}
        self._queue = Queue(self._known)
        self._num_slots = 0
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
            work = Work(request, self._group(request))
            self._unfinished[request.sample_id] = work
            self._queue.put(work)

    def engine_ready(self, name: str, slots: int) -> None:
        """Add an engine that runs `slots` requests at once."""
        assert name not in self._engines, f"engine {name} is already here"
        self._engines[name] = _Engine(name, Held(slots))
        self._num_slots += slots
        self._changed(self._engines[name])

    def engine_lost(self, name: str) -> list[str]:
        """Remove an engine, requeue all of its samples, and return their ids."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return []
        self._num_slots -= engine.held.slots
        for work in reversed(engine.held.works.values()):
            self._requeue(work)
        return list(engine.held.works)

    def finished(self, name: str, lengths: Mapping[str, int] | Iterable[str]) -> list[str]:
        """Note finished samples and their tokens; return the ids without unknown and repeated ones.

        What the lengths tell about samples that are still to come changes the order of the queue.
        """
        engine = self._engines.get(name)
        if engine is None:
            return []
        if not isinstance(lengths, Mapping):
            lengths = dict.fromkeys(lengths, 0)
        ended = [sample_id for sample_id in lengths if self._owned(sample_id, name)]
        for sample_id in ended:
            engine.held.ended(sample_id, lengths[sample_id])
            self._learn(engine, self._unfinished.pop(sample_id), lengths[sample_id])
        if not self._unfinished:
            self._rollout_ended()
        engine.recalled_in_vain = False
        self._changed(engine)
        return ended

    def _rollout_ended(self) -> None:
        if self._forecast is not None:
            self._forecast.rollout_ended()
        if self._together:
            for engine in self._engines.values():
                engine.groups.clear()

    def failed(self, name: str, sample_ids: Iterable[str]) -> list[str]:
        """Requeue samples that the engine broke off, and return their ids."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        again = [sample_id for sample_id in sample_ids if self._owned(sample_id, name)]
        for sample_id in again:
            self._requeue(engine.held.remove(sample_id))
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
                work = engine.held.remove(sample_id)
                work.attempts -= 1  # the sample never started
                self._requeue(work)
        self._changed(engine)

    # --- decisions ----------------------------------------------------------------------------

    def actions(self) -> list[Assign | Recall]:
        """Return what to do now. Call it after every event, and carry out every action."""
        assigned: dict[str, list[SampleRequest]] = {}
        while self._queue:
            engine = self._pop(self._with_free_slot) or self._pop(self._with_room)
            if engine is None:
                break
            many_wait = len(self._queue) > QUEUED * self._num_slots
            work = self._queue.take(engine.groups if self._together and many_wait else None)
            self._give(engine, work)
            assigned.setdefault(engine.name, []).append(work.request)
        actions: list[Assign | Recall] = [
            Assign(name, tuple(requests)) for name, requests in assigned.items()
        ]
        if not self._queue:
            actions.extend(self._recalls())
        return actions

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
                wanted = idle.held.slots - len(idle.held.works)
            count = min(wanted, len(loaded.held.behind))
            wanted -= count
            # The requests given last are at the end of the engine's queue.
            ids = tuple(itertools.islice(reversed(loaded.held.works), count))
            loaded.recalling = True
            self._changed(loaded)
            recalls.append(Recall(loaded.name, ids))
        for engine in idle_engines:
            self._changed(engine)
        return recalls

    # --- forecasts ----------------------------------------------------------------------------

    def _group(self, request: SampleRequest) -> str:
        """Return a name that requests with the same forecast share."""
        if self._together:
            return prompt_key(request)
        if self._forecast is None:
            return ""
        if request.sampling.ignore_eos:
            return str(request.sampling.max_tokens)
        return prompt_key(request)

    def _known(self, work: Work) -> int | None:
        """Return the tokens to expect of a response; None if nothing is known."""
        limit = work.request.sampling.max_tokens
        if self._together:
            return None  # so that the first of each group goes out first
        if self._forecast is None or work.request.sampling.ignore_eos:
            return limit
        length = self._forecast.expected(work.group)
        return length if length is None else min(length, limit)

    def _learn(self, engine: _Engine, ended: Work, tokens: int) -> None:
        """Note what an ended response tells about its siblings, and about those beside it."""
        if self._forecast is None:
            return
        if not ended.request.sampling.ignore_eos:
            self._forecast.ended(ended.group, tokens)
            self._queue.reorder(ended.group)
        for work, so_far in engine.held.outgrown():
            if not work.request.sampling.ignore_eos:
                self._forecast.runs(work.group, so_far)
                self._queue.reorder(work.group)

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
        return len(self._engines[name].held.works)

    def held_by(self, name: str) -> set[str]:
        """Return the requests that an engine holds, as far as the pool knows."""
        return set(self._engines[name].held.works)

    # --- bookkeeping --------------------------------------------------------------------------

    def _owned(self, sample_id: str, name: str) -> bool:
        return sample_id in self._unfinished and self._unfinished[sample_id].owner == name

    def _give(self, engine: _Engine, work: Work) -> None:
        expected = self._known(work)
        work.expected = work.request.sampling.max_tokens if expected is None else expected
        work.owner = engine.name
        work.attempts += 1
        engine.held.add(work)
        if self._together:
            engine.groups[work.group] = None
        self._changed(engine)

    def _requeue(self, work: Work) -> None:
        request = work.request
        work.owner = None
        if work.attempts >= self._max_attempts:
            raise EngineError(
                f"sample {request.sample_id!r} was on {self._max_attempts} engines that were lost "
                f"or broke it off; its prompt ({len(request.prompt_token_ids)} tokens) may be the "
                "cause"
            )
        self._queue.put_back(work)

    def _changed(self, engine: _Engine) -> None:
        """Push a new entry for the engine onto every heap it now belongs to."""
        engine.stamp += 1
        held = engine.held
        load = held.tokens_left()
        if self._forecast is not None:
            load += APART * held.longest_left()
        entry = (load, next(self._count), engine.stamp, engine.name)
        if len(held.works) < held.slots:
            heapq.heappush(self._with_free_slot, entry)
        elif len(held.works) < held.slots + self._prefetch:
            heapq.heappush(self._with_room, entry)
        if held.behind and not (engine.recalling or engine.recalled_in_vain):
            heapq.heappush(self._with_waiting, (-len(held.behind), *entry[1:]))

    def _pop(self, heap: list[tuple[int, int, int, str]]) -> _Engine | None:
        """Pop the first engine, and drop stale entries. The caller must call `_changed` for it."""
        while heap:
            _, _, stamp, name = heapq.heappop(heap)
            engine = self._engines.get(name)
            if engine is not None and engine.stamp == stamp:
                return engine
        return None
