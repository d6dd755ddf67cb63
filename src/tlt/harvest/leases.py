"""Who may train the drafter, and until when. Pure: no clock but what it is given.

A worker is an engine's place in the cluster: its cores or GPUs. It is

- busy while the run uses it,
- idle when it has nothing to generate,
- leased while the trainer beside it may use it,
- ending from the moment its lease is called back until its trainer has stopped for certain: by
  its own word or by its death.

The run says `idle` and `needed`, and uses a worker again only after `Freed`. Messages may come
late, twice, in another order or never. So the run numbers what it says about a worker (`turn`), and
old news is ignored; leases are numbered once and for all, a trainer ignores a lease older than one
that was called back (`Holder`), and only the current lease may publish. Whoever does not answer is
told again, then killed. Work per event is O(log workers).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

EPOCH = 2**32
"""Lease numbers of a later coordinator are all above those of an earlier one."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    min_s: float = 2.0
    """A worker is leased only if it will be idle for at least so long."""
    lease_s: float = 60.0
    """A lease ends by itself after this time; a worker that is still idle gets another."""
    resend_s: float = 0.5
    """How often a trainer that does not answer is told again."""
    stop_timeout_s: float = 2.0
    """A trainer that has not stopped after this time is killed."""
    max_leases: int = 8
    """Trainers at once: more than a few teach each other little."""


class State(StrEnum):
    BUSY = "busy"
    IDLE = "idle"
    LEASED = "leased"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell the trainer that it may work, for at most so long."""

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
    turn: int


Action = Begin | End | Kill | Freed


@dataclass(slots=True)
class _Worker:
    name: str
    state: State = State.BUSY
    turn: int = -1
    lease: int = 0
    idle_since_s: float = 0.0
    idle_until_s: float = math.inf
    """When the run is expected to need it."""
    rests_until_s: float = 0.0
    """No lease before: its trainer has nothing to do, or failed."""
    expires_s: float = 0.0
    kill_s: float = math.inf
    wanted: int | None = None
    """The turn in which the run asked for it."""
    queued: bool = False
    ready: bool = False
    """Its trainer can take a lease."""


@dataclass(slots=True)
class Counts:
    """Since the beginning, in worker seconds where seconds."""

    leases: int = 0
    kills: int = 0
    leased_s: float = 0.0
    idle_s: float = 0.0
    coverable_s: float = 0.0
    """Idle seconds in spells long enough for a lease, while there was something to learn."""


class Leases:
    """Feed it events, then carry out `actions()`; call `tick` when `next_s()` has come."""

    def __init__(self, settings: LeaseSettings, epoch: int = 1) -> None:
        self._settings = settings
        self._number = epoch * EPOCH
        self._workers: dict[str, _Worker] = {}
        self._idle: deque[str] = deque()
        self._deadlines: list[tuple[float, str, int]] = []
        self._actions: list[Action] = []
        self._num_leases = 0
        self.num_ready = 0
        """Workers with a trainer that can take a lease."""
        self.enabled = True
        """False grants nothing: there is nothing to learn from, or harvest is switched off."""
        self.counts = Counts()

    # --- what the run says --------------------------------------------------------------------

    def idle(self, worker: str, turn: int, now_s: float, until_s: float = math.inf) -> None:
        """The worker has nothing to generate, probably until then."""
        found = self._found(worker)
        if turn <= found.turn:
            return
        found.turn, found.idle_until_s = turn, until_s
        if found.state is State.BUSY:
            self._to_idle(found, now_s)
        elif found.state is State.IDLE:
            self._queue(found)  # the forecast may have changed
        elif found.state is State.ENDING:
            found.wanted = None

    def needed(self, worker: str, turn: int, now_s: float) -> None:
        """The run wants the worker back; answered by `Freed`, again if asked again."""
        found = self._found(worker)
        if turn < found.turn:
            return
        found.turn = turn
        if found.state is State.IDLE:
            self._count_idle(found, now_s)
            found.state = State.BUSY
        if found.state is State.BUSY:
            self._actions.append(Freed(worker, turn))
            return
        found.wanted = turn
        if found.state is State.LEASED:
            self._end(found, now_s)

    # --- what is heard of trainers ------------------------------------------------------------

    def ended(self, worker: str, lease: int, now_s: float, rest_s: float = 0.0) -> None:
        """The trainer has stopped, or is dead; it gets no other lease for `rest_s`."""
        found = self._found(worker)
        if lease != found.lease or found.state not in (State.LEASED, State.ENDING):
            return
        self._num_leases -= 1
        self.counts.leased_s += now_s - (found.expires_s - self._settings.lease_s)
        found.rests_until_s = now_s + rest_s
        if found.wanted is None:
            self._to_idle(found, found.idle_since_s)
        else:
            self._count_idle(found, now_s)
            found.state = State.BUSY
            self._actions.append(Freed(worker, found.wanted))
            found.wanted = None

    def set_ready(self, worker: str, ready: bool) -> None:
        """Whether there is a trainer that can take a lease."""
        found = self._found(worker)
        self.num_ready += ready - found.ready
        found.ready = ready
        if ready:
            self._queue(found)

    def may_publish(self, worker: str, lease: int, now_s: float) -> bool:
        """Whether this is the word of a trainer that still holds its lease."""
        found = self._workers.get(worker)
        return (
            found is not None
            and found.state is State.LEASED
            and found.lease == lease
            and now_s < found.expires_s
        )

    # --- time and decisions -------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """End what has expired, and press those that do not answer."""
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
        """When `tick` has something to do."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def actions(self, now_s: float) -> list[Action]:
        """What to do now. Call after every event and carry it all out."""
        while self.enabled and self._idle and self._num_leases < self._settings.max_leases:
            worker = self._workers[self._idle.popleft()]
            worker.queued = False
            if worker.state is not State.IDLE or not worker.ready:
                continue
            if worker.idle_until_s - now_s < self._settings.min_s:
                continue  # not worth it; the run will say when it is idle again
            if worker.rests_until_s > now_s:
                self._deadline(worker.rests_until_s, worker.name, 0)
                continue
            self._grant(worker, now_s)
        actions, self._actions = self._actions, []
        return actions

    def _grant(self, worker: _Worker, now_s: float) -> None:
        self._number += 1
        self._num_leases += 1
        self.counts.leases += 1
        worker.lease, worker.state = self._number, State.LEASED
        worker.expires_s = now_s + self._settings.lease_s
        self._deadline(worker.expires_s, worker.name, worker.lease)
        self._actions.append(Begin(worker.name, worker.lease, self._settings.lease_s))

    def _end(self, worker: _Worker, now_s: float) -> None:
        worker.state = State.ENDING
        worker.kill_s = now_s + self._settings.stop_timeout_s
        self._actions.append(End(worker.name, worker.lease))
        self._deadline(now_s + self._settings.resend_s, worker.name, worker.lease)

    # --- state --------------------------------------------------------------------------------

    def state(self, worker: str) -> State:
        return self._workers[worker].state

    def lease_of(self, worker: str) -> int | None:
        """The lease that a worker holds, if it may use it."""
        found = self._workers[worker]
        return found.lease if found.state is State.LEASED else None

    def leased(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.state is State.LEASED]

    def _found(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker(worker))

    def _to_idle(self, worker: _Worker, since_s: float) -> None:
        worker.state, worker.idle_since_s = State.IDLE, since_s
        self._queue(worker)

    def _queue(self, worker: _Worker) -> None:
        if worker.state is State.IDLE and not worker.queued:
            worker.queued = True
            self._idle.append(worker.name)

    def _count_idle(self, worker: _Worker, now_s: float) -> None:
        idle_s = now_s - worker.idle_since_s
        self.counts.idle_s += idle_s
        if self.enabled and worker.ready and idle_s >= self._settings.min_s:
            self.counts.coverable_s += idle_s

    def _deadline(self, at_s: float, worker: str, lease: int) -> None:
        heapq.heappush(self._deadlines, (at_s, worker, lease))


class Holder:
    """A trainer's side of its leases: may it work now?"""

    def __init__(self) -> None:
        self._lease = 0
        self._ended = 0
        self._until_s = 0.0

    def begin(self, lease: int, seconds: float, now_s: float) -> bool:
        """Take up a lease; False when it is an old one, or has been called back already."""
        if lease <= max(self._lease, self._ended):
            return False
        self._lease, self._until_s = lease, now_s + seconds
        return True

    def end(self, lease: int) -> None:
        """Give a lease back, also one that has not come yet."""
        self._ended = max(self._ended, lease)

    def holds(self, lease: int, now_s: float) -> bool:
        return lease == self._lease > self._ended and now_s < self._until_s
