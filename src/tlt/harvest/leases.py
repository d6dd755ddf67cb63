"""Which workers may train the drafter, and until when. Pure: the caller passes the time.

A worker is an engine's place in the cluster: its cores or GPUs. A worker is

- busy while the run uses it,
- idle while it has nothing to generate,
- leased while the trainer beside it may use it,
- ending from the moment its lease is called back until its trainer has certainly stopped: the
  trainer confirmed it, or is dead.

The run says `idle` and `needed`, in order, and uses a worker again only after `Freed`. Messages to
and from trainers may come late, twice, in another order or never. So every lease has a number of
its own, a trainer ignores a lease older than one that was called back (`Holder`), and only the
current lease may publish. A trainer that does not answer is told again, then killed. Work per event
is O(log workers).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

STOP_S = 2.0
"""Seconds in which a trainer breaks off its work, on any device."""
COPY_BYTES_PER_S = 4e9
"""Pace of a copy between a GPU and pageable host memory: assumed, at the low end. Pinned memory is
several times as fast; the first leases do not have it yet."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """When a worker is leased, for how long, and how a trainer is stopped."""

    min_s: float
    """Shortest expected idle time for which a worker is leased. A worker that has already been idle
    for so long is leased in any case: in a heavy tail, a long idle time tends to last."""
    lease_s: float
    """Seconds after which a lease ends by itself; a worker that is still idle gets another."""
    stop_timeout_s: float
    """Seconds after which a trainer that has not stopped is killed."""
    max_leases: int
    """Largest number of leases at a time: trainers beyond a few add little."""
    resend_s: float = 0.5
    """Seconds between two reminders to a trainer that does not answer."""


class State(StrEnum):
    BUSY = "busy"
    IDLE = "idle"
    LEASED = "leased"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell the trainer that it may work, for at most `seconds`."""

    worker: str
    lease: int
    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """Tell the trainer to stop; answer with `ended`."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the trainer's process; answer with `ended` when it is gone."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Tell the run that the worker is its own again."""

    worker: str


Action = Begin | End | Kill | Freed


@dataclass(slots=True)
class _Worker:
    name: str
    state: State = State.BUSY
    lease: int = 0
    idle_since_s: float = 0.0
    idle_until_s: float = math.inf
    """When the run is expected to need the worker."""
    rests_until_s: float = 0.0
    """Time before which the worker gets no lease: its trainer had nothing to do, or failed."""
    expires_s: float = 0.0
    kill_s: float = math.inf
    wanted: bool = False
    """Whether the run waits for `Freed`."""
    ready: bool = False
    """Whether a trainer beside the worker can take a lease."""


@dataclass(slots=True)
class Counts:
    """Totals since the beginning; seconds are worker seconds."""

    leases: int = 0
    kills: int = 0
    leased_s: float = 0.0
    idle_s: float = 0.0
    coverable_s: float = 0.0
    """Seconds of idle spells long enough for a lease, while there was something to learn."""


class Leases:
    """Feed it events, then carry out `actions()`; call `tick` when `next_s()` has come."""

    def __init__(self, settings: LeaseSettings) -> None:
        self._settings = settings
        self._workers: dict[str, _Worker] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Idle workers that may get a lease, in order."""
        self._deadlines: list[tuple[float, str, int]] = []
        self._actions: list[Action] = []
        self._num_leases = 0
        self._numbers = itertools.count(1)
        self.num_ready = 0
        """Workers with a trainer that can take a lease."""
        self.enabled = True
        """False grants no lease: there is nothing to learn from, or the coordinator ends."""
        self.counts = Counts()

    # --- what the run says --------------------------------------------------------------------

    def idle(self, worker: str, now_s: float, until_s: float = math.inf) -> None:
        """Note that the worker has nothing to generate, probably until `until_s`.

        The run does not report this while it waits for `Freed`.
        """
        found = self._found(worker)
        assert not found.wanted, f"{worker} is idle before it was freed"
        found.idle_until_s = until_s
        if found.state is State.BUSY:
            self._to_idle(found, now_s)
        elif found.state is State.IDLE:
            self._queue(found)  # the forecast may have changed

    def needed(self, worker: str, now_s: float) -> None:
        """Note that the run wants the worker back; `Freed` answers, again if asked again."""
        found = self._found(worker)
        if found.state is State.IDLE:
            self._count_idle(found, now_s)
            found.state = State.BUSY
        if found.state is State.BUSY:
            self._actions.append(Freed(worker))
            return
        found.wanted = True
        if found.state is State.LEASED:
            self._end(found, now_s)

    # --- reports of trainers ------------------------------------------------------------------

    def ended(self, worker: str, lease: int, now_s: float, rest_s: float = 0.0) -> None:
        """Note that the trainer has stopped or died; the worker gets no lease for `rest_s`."""
        found = self._found(worker)
        if lease != found.lease or found.state not in (State.LEASED, State.ENDING):
            return
        self._num_leases -= 1
        self.counts.leased_s += now_s - (found.expires_s - self._settings.lease_s)
        found.rests_until_s = now_s + rest_s
        if found.wanted:
            self._count_idle(found, now_s)
            found.state, found.wanted = State.BUSY, False
            self._actions.append(Freed(worker))
        else:
            self._to_idle(found, found.idle_since_s)

    def set_ready(self, worker: str, ready: bool) -> None:
        """Note whether a trainer beside the worker can take a lease."""
        found = self._found(worker)
        self.num_ready += ready - found.ready
        found.ready = ready
        if ready:
            self._queue(found)

    def may_publish(self, worker: str, lease: int, now_s: float) -> bool:
        """Return whether the worker still holds this lease, and it has not run out."""
        return self.lease_of(worker) == lease and now_s < self._workers[worker].expires_s

    # --- time and decisions -------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """End leases that have expired, and remind or kill trainers that do not answer."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, name, lease = heapq.heappop(self._deadlines)
            worker = self._workers[name]
            if lease == 0:
                self._queue(worker)
            elif worker.lease != lease:
                continue
            elif worker.state is State.LEASED:
                self._end(worker, now_s)
            elif worker.state is State.ENDING:
                killed = now_s >= worker.kill_s
                self._actions.append((Kill if killed else End)(name, lease))
                self.counts.kills += killed
                self._deadline(now_s + self._settings.resend_s, name, lease)

    def next_s(self) -> float:
        """Return the time at which `tick` has something to do."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def actions(self, now_s: float) -> list[Action]:
        """Return what to do now. Call it after every event, and carry out every action."""
        while self.enabled and self._idle and self._num_leases < self._settings.max_leases:
            name, _ = self._idle.popitem(last=False)
            worker = self._workers[name]
            if worker.state is not State.IDLE or not worker.ready:
                continue
            proven_s = worker.idle_since_s + self._settings.min_s
            if worker.idle_until_s - now_s < self._settings.min_s and now_s < proven_s:
                self._deadline(proven_s, name, 0)  # not worth it by the present forecast
                continue
            if worker.rests_until_s > now_s:
                self._deadline(worker.rests_until_s, name, 0)
                continue
            self._grant(worker, now_s)
        actions, self._actions = self._actions, []
        return actions

    def _grant(self, worker: _Worker, now_s: float) -> None:
        self._num_leases += 1
        self.counts.leases += 1
        worker.lease, worker.state = next(self._numbers), State.LEASED
        worker.expires_s = now_s + self._settings.lease_s
        self._deadline(worker.expires_s, worker.name, worker.lease)
        self._actions.append(Begin(worker.name, worker.lease, self._settings.lease_s))

    def _end(self, worker: _Worker, now_s: float) -> None:
        worker.state = State.ENDING
        worker.kill_s = now_s + self._settings.stop_timeout_s
        self._actions.append(End(worker.name, worker.lease))
        self._deadline(now_s + self._settings.resend_s, worker.name, worker.lease)

    # --- state --------------------------------------------------------------------------------

    def lease_of(self, worker: str) -> int | None:
        """Return the lease under which the worker's trainer may work now."""
        found = self._found(worker)
        return found.lease if found.state is State.LEASED else None

    def leased(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.state is State.LEASED]

    def _found(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker(worker))

    def _to_idle(self, worker: _Worker, since_s: float) -> None:
        worker.state, worker.idle_since_s = State.IDLE, since_s
        self._queue(worker)

    def _queue(self, worker: _Worker) -> None:
        if worker.state is State.IDLE:
            self._idle.setdefault(worker.name)

    def _count_idle(self, worker: _Worker, now_s: float) -> None:
        idle_s = now_s - worker.idle_since_s
        self.counts.idle_s += idle_s
        if self.enabled and worker.ready and idle_s >= self._settings.min_s:
            self.counts.coverable_s += idle_s

    def _deadline(self, at_s: float, worker: str, lease: int) -> None:
        heapq.heappush(self._deadlines, (at_s, worker, lease))


# --- trainers -------------------------------------------------------------------------------------


def moved_bytes(num_parameters: int) -> int:
    """Return the bytes of a trainer that go from a GPU to the host when its lease ends.

    Between leases a trainer's float32 weights, both optimizer moments and the mean of its weights
    wait in host memory. Gradients are dropped, and the policy's head and embedding have a copy on
    the host anyway.
    """
    return 4 * num_parameters * 4


def stop_timeout_s(num_parameters: int, embed_and_head_bytes: int, on_gpu: bool) -> float:
    """Return the seconds that a trainer may take to stop before it is killed.

    A lease may be called back while the trainer still moves in, so the time covers both ways.
    `embed_and_head_bytes` counts the policy's head and embedding, which only move in.
    """
    if not on_gpu:
        return STOP_S
    both_ways = 2 * moved_bytes(num_parameters) + embed_and_head_bytes
    return STOP_S + both_ways / COPY_BYTES_PER_S


class Holder:
    """A trainer's own record of its leases: whether it may work now."""

    def __init__(self) -> None:
        self._lease = 0
        self._ended = 0
        self._until_s = 0.0

    def begin(self, lease: int, seconds: float, now_s: float) -> bool:
        """Take up a lease; return False if it is old, or was called back already.

        A message that comes twice gets the same answer.
        """
        if lease == self._lease > self._ended:
            return True
        if lease <= max(self._lease, self._ended):
            return False
        self._lease, self._until_s = lease, now_s + seconds
        return True

    def end(self, lease: int) -> None:
        """Give a lease back, also one that has not arrived yet."""
        self._ended = max(self._ended, lease)

    def end_current(self) -> None:
        """Give the current lease back: work that comes late under this lease does nothing."""
        self.end(self._lease)

    def holds(self, lease: int, now_s: float) -> bool:
        return lease == self._lease > self._ended and now_s < self._until_s
