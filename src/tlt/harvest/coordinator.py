"""Carries leases out: trainers begin, work in rounds, and stop. asyncio only; Ray stays in `run`.

A round: all trainers that hold a lease start from the same weights and train for a few seconds;
then their results are averaged, judged on held-out samples, and published if they are better.
Whoever is late, dead or called back in the middle is left out. A worker leased alone is a round of
one.

What was learned last, published or not, stays with the trainer that learned it, which is the
`head`; another trainer that goes on from there asks for its weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tlt.harvest.leases import Begin, End, Freed, Kill, Leases, LeaseSettings

logger = logging.getLogger(__name__)

REST_S = 5.0
"""After a failure, or with nothing to learn, a trainer gets no lease for this long."""
GRACE_S = 1.0
"""How long after its end a round waits for members that have not answered."""
KEEP_STOPS = 4096


class TrainerGone(RuntimeError):
    """The trainer's process is dead."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a piece of training came to."""

    num_steps: int
    num_tokens: int
    loss: float
    starved: bool
    """There was nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The drafter against the published one, on the same held-out samples."""

    better: bool
    length: float
    """Expected tokens per verified draft."""
    published_length: float


class TrainerHandle(Protocol):
    """A `SpotTrainer` somewhere else; a dead one raises `TrainerGone`. Weights are opaque here."""

    async def start(self) -> None:
        """Ends when the trainer can take a lease."""
        ...

    async def begin(self, lease: int, seconds: float) -> bool: ...
    async def end(self, lease: int) -> None: ...
    async def take(self, base: Any, published: Any, policy: Any) -> None: ...
    async def train(self, lease: int, seconds: float) -> Trained: ...
    async def judge(self, lease: int) -> Judged | None: ...
    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float
    ) -> bool: ...
    async def export(self) -> Any: ...
    async def release(self) -> None: ...
    async def kill(self) -> None:
        """Ends when the process is gone."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    session_s: float = 10.0
    """Seconds of training between judgements."""
    publish: bool = True
    """False does everything but tell the engines."""


@dataclass(frozen=True, slots=True)
class Version:
    """A drafter for the engines."""

    number: int
    weights: Any
    length: float
    """Expected tokens per draft on held-out samples."""


@dataclass(slots=True)
class Tally:
    """What harvest came to, since the beginning."""

    trained_tokens: int = 0
    trained_steps: int = 0
    used_s: float = 0.0
    """Worker seconds of training, judging and merging."""
    loss: float = 0.0
    length: float = 0.0
    published: int = 0
    refused: int = 0
    """Results that were no better than the published drafter."""
    merges: int = 0
    faults: int = 0
    trainer_restarts: int = 0
    stop_max_s: float = 0.0
    """Longest time between calling a lease back and the device being free."""


class _Round:
    def __init__(self, number: int, ends_s: float) -> None:
        self.number = number
        self.ends_s = ends_s
        self.members: dict[str, int] = {}
        """Leases of those at work."""
        self.results: dict[str, tuple[int, Trained]] = {}
        """Lease and result of those that are done."""
        self.broken_off: dict[str, Trained] = {}
        self.leader: str | None = None
        """Who makes one drafter of the results."""
        self.closed = asyncio.Event()
        self.changed = asyncio.Event()


class Coordinator:
    def __init__(
        self,
        settings: CoordinatorSettings,
        spawn: Callable[[str], TrainerHandle],
        epoch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._spawn = spawn
        self._clock = clock
        self._leases = Leases(settings.leases, epoch)
        self._leases.enabled = False  # until there is something to learn from
        self._trainers: dict[str, TrainerHandle] = {}
        self._waiting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._round: _Round | None = None
        self._num_rounds = 0
        self._head: tuple[str, Any] | None = None
        """Who learned last, and the weights once somebody asked for them."""
        self._at_head: set[str] = set()
        """Trainers whose weights are those of the head."""
        self._policy: tuple[int, Any] = (0, None)
        self._published: tuple[int, Any] = (0, None)
        self._has: dict[str, dict[str, int]] = {}
        """Which policy and which published drafter a trainer has."""
        self._versions: asyncio.Queue[Version] = asyncio.Queue()
        self._ending_since: dict[int, float] = {}
        self._called_back: dict[int, asyncio.Event] = {}
        self._stops: deque[float] = deque(maxlen=KEEP_STOPS)
        self.tally = Tally()

    # --- what the run says --------------------------------------------------------------------

    def join(self, worker: str) -> None:
        """A worker, beside which a trainer starts."""
        if worker not in self._trainers:
            self._begin_trainer(worker)

    def start_from(self, version: int, weights: Any) -> None:
        """The drafter that the engines have; None is the one they started with."""
        self._published = version, weights

    def idle(self, worker: str, turn: int, for_s: float = math.inf) -> None:
        """The worker has nothing to generate, probably for so long."""
        now_s = self._clock()
        self._leases.idle(worker, turn, now_s, now_s + for_s)
        self._carry_out()

    async def needed(self, worker: str, turn: int) -> None:
        """The run wants the worker; returns when its device is free."""
        freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, []).append((turn, freed))
        self._leases.needed(worker, turn, self._clock())
        self._carry_out()
        await freed

    def policy_changed(self, version: int, head_and_embedding: Any) -> None:
        """The policy that samples come from now; its states are in the buffers."""
        self._policy = version, head_and_embedding
        self._leases.enabled = True
        self._carry_out()

    async def next_version(self, timeout_s: float) -> Version | None:
        """The next drafter to publish; None when there is none for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._versions.get()
        except TimeoutError:
            return None

    def metrics(self) -> dict[str, float]:
        return {
            **asdict(self.tally),
            **asdict(self._leases.counts),
            "trainers": len(self._leases.leased()),
            "ready": self._leases.num_ready,
        }

    def stop_seconds(self) -> list[float]:
        """How long it took to free a device, each time."""
        return list(self._stops)

    async def shutdown(self) -> None:
        self._leases.enabled = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(t.kill() for t in self._trainers.values()), return_exceptions=True)

    # --- carrying out decisions ---------------------------------------------------------------

    def _carry_out(self) -> None:
        for action in self._leases.actions(self._clock()):
            if isinstance(action, Begin):
                self._start(self._lease(action))
            elif isinstance(action, End):
                self._ending_since.setdefault(action.lease, self._clock())
                if (called_back := self._called_back.get(action.lease)) is not None:
                    called_back.set()
                self._start(self._tell_end(action))
            elif isinstance(action, Kill):
                logger.warning("the trainer of %s does not stop and is killed", action.worker)
                self._start(self._replace(action.worker, self._trainers[action.worker]))
            else:
                self._free(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._leases.next_s()
        if next_s < math.inf:
            delay_s = max(0.0, next_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._leases.tick(self._clock())
        self._carry_out()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _free(self, action: Freed) -> None:
        waiting = self._waiting.pop(action.worker, [])
        for turn, freed in waiting:
            if turn <= action.turn and not freed.done():
                freed.set_result(None)
            elif turn > action.turn:
                self._waiting.setdefault(action.worker, []).append((turn, freed))

    async def _tell_end(self, action: End) -> None:
        with suppress(TrainerGone):  # which its lease notices
            await self._trainers[action.worker].end(action.lease)

    def _begin_trainer(self, worker: str) -> None:
        self._trainers[worker] = trainer = self._spawn(worker)
        self._has[worker] = {}
        self._start(self._await_ready(worker, trainer))

    async def _await_ready(self, worker: str, trainer: TrainerHandle) -> None:
        try:
            await trainer.start()
        except Exception as error:
            self.tally.faults += 1
            logger.warning("no trainer starts beside %s (%r); it is not harvested", worker, error)
            return
        if self._trainers.get(worker) is trainer:
            self._leases.set_ready(worker, True)
            self._carry_out()

    async def _replace(self, worker: str, trainer: TrainerHandle) -> None:
        """Another process for a trainer that is dead or does not answer."""
        self._leases.set_ready(worker, False)
        await trainer.kill()
        if self._trainers.get(worker) is trainer:
            self.tally.trainer_restarts += 1
            self._at_head.discard(worker)
            self._begin_trainer(worker)
            if self._head is not None and self._head[0] == worker and self._head[1] is None:
                self._head = None  # what it learned last is lost; the published drafter is not

    # --- one lease ----------------------------------------------------------------------------

    async def _lease(self, begin: Begin) -> None:
        worker, trainer, rest_s = begin.worker, self._trainers[begin.worker], 0.0
        self._called_back[begin.lease] = asyncio.Event()
        try:
            if await trainer.begin(begin.lease, begin.seconds):
                rest_s = await self._work(worker, begin.lease, trainer)
                await trainer.release()
        except TrainerGone:
            logger.warning("the trainer of %s died; another one starts", worker)
            self.tally.faults += 1
            rest_s = REST_S
            await self._replace(worker, trainer)
        except Exception as error:
            logger.warning("the trainer of %s failed (%r); harvest goes on later", worker, error)
            self.tally.faults += 1
            rest_s = REST_S
            self._at_head.discard(worker)
        now_s = self._clock()
        del self._called_back[begin.lease]
        if (since_s := self._ending_since.pop(begin.lease, None)) is not None:
            self._stops.append(now_s - since_s)
            self.tally.stop_max_s = max(self.tally.stop_max_s, now_s - since_s)
        self._leases.ended(worker, begin.lease, now_s, rest_s)
        self._carry_out()

    async def _work(self, worker: str, lease: int, trainer: TrainerHandle) -> float:
        """Round after round until the lease ends; how long to rest afterwards."""
        while self._leases.lease_of(worker) == lease:
            current = self._join_round(worker, lease)
            try:
                await self._bring_up_to_date(worker, trainer)
                self._at_head.discard(worker)
                started_s = self._clock()
                trained = await trainer.train(lease, max(0.0, current.ends_s - started_s))
                self._count(trained, started_s)
            except BaseException:
                self._leave(current, worker, None)
                raise
            if trained.starved:
                self._leave(current, worker, None)
                return REST_S
            if self._leases.lease_of(worker) != lease:
                self._leave(current, worker, trained)
                return 0.0
            current.results[worker] = lease, trained
            self._leave(current, worker, None)
            await _first_of(current.closed, self._called_back[lease])
            if current.leader == worker:
                await current.closed.wait()  # it may still be judging, if not for long
        return 0.0

    async def _bring_up_to_date(self, worker: str, trainer: TrainerHandle) -> None:
        has = self._has[worker]
        policy = published = base = None
        (policy_version, new_policy), (drafter_version, new_drafter) = self._policy, self._published
        if has.get("policy", 0) != policy_version:
            policy = new_policy
        if has.get("published", 0) != drafter_version:
            published = new_drafter
        if worker not in self._at_head:
            base = await self._head_weights(worker)
        await trainer.take(base, published, policy)
        has |= {"policy": policy_version, "published": drafter_version}

    async def _head_weights(self, worker: str) -> Any:
        """What was learned last, or else what was published last."""
        if self._head is None:
            return self._published[1]
        owner, weights = self._head
        if weights is None and owner != worker:
            try:
                weights = await self._trainers[owner].export()
                if self._head is not None and self._head[0] == owner:
                    self._head = owner, weights
            except TrainerGone:
                self._head = None
                return self._published[1]
        return weights

    def _count(self, trained: Trained, started_s: float) -> None:
        self.tally.used_s += self._clock() - started_s
        self.tally.trained_tokens += trained.num_tokens
        self.tally.trained_steps += trained.num_steps
        if trained.num_steps:
            self.tally.loss = trained.loss

    # --- rounds -------------------------------------------------------------------------------

    def _join_round(self, worker: str, lease: int) -> _Round:
        if self._round is None:
            self._num_rounds += 1
            self._round = _Round(self._num_rounds, self._clock() + self._settings.session_s)
            self._start(self._close(self._round))
        self._round.members[worker] = lease
        return self._round

    def _leave(self, current: _Round, worker: str, broken_off: Trained | None) -> None:
        current.members.pop(worker, None)
        if broken_off is not None and broken_off.num_steps:
            current.broken_off[worker] = broken_off
        current.changed.set()

    async def _close(self, current: _Round) -> None:
        """Wait for the members, then make one drafter of what they learned."""
        try:
            while current.members:
                current.changed.clear()
                left_s = current.ends_s + GRACE_S - self._clock()
                if left_s <= 0:
                    break
                try:
                    async with asyncio.timeout(left_s):
                        await current.changed.wait()
                except TimeoutError:
                    break
            if self._round is current:
                self._round = None  # whoever comes now starts the next one
            await self._settle(current)
        except TrainerGone:
            self.tally.faults += 1  # the lease of that trainer sees to it
        except Exception as error:
            logger.warning("a round of drafter training was lost (%r)", error)
            self.tally.faults += 1
        finally:
            if self._round is current:
                self._round = None
            current.closed.set()

    async def _settle(self, current: _Round) -> None:
        holding = {
            worker: (lease, trained)
            for worker, (lease, trained) in current.results.items()
            if self._leases.lease_of(worker) == lease and trained.num_steps
        }
        if not holding:
            # All were called back in the middle: the one that got furthest keeps what it has.
            done = {w: t for w, (_, t) in current.results.items()} | current.broken_off
            done = {w: t for w, t in done.items() if t.num_steps}
            if done:
                self._set_head(max(done, key=lambda w: done[w].num_tokens))
            return
        leader = current.leader = next(iter(holding))
        lease, _ = holding[leader]
        trainer = self._trainers[leader]
        started_s = self._clock()
        if len(holding) > 1:
            await self._merge(holding, leader)
        judged = await trainer.judge(lease)
        self._set_head(leader)
        self.tally.used_s += self._clock() - started_s
        if judged is None:
            return
        self.tally.length = judged.length
        if not judged.better:
            self.tally.refused += 1
        elif self._settings.publish:
            await self._publish(leader, lease, judged)

    async def _merge(self, holding: dict[str, tuple[int, Trained]], leader: str) -> None:
        others = [worker for worker in holding if worker != leader]
        exports = await asyncio.gather(
            *(self._trainers[worker].export() for worker in others), return_exceptions=True
        )
        arrived = [
            (weights, float(holding[worker][1].num_tokens))
            for worker, weights in zip(others, exports, strict=True)
            if not isinstance(weights, BaseException)
        ]
        lease, trained = holding[leader]
        if arrived and await self._trainers[leader].merge(lease, arrived, trained.num_tokens):
            self.tally.merges += 1

    def _set_head(self, worker: str) -> None:
        self._head = worker, None
        self._at_head = {worker}

    async def _publish(self, leader: str, lease: int, judged: Judged) -> None:
        weights = await self._trainers[leader].export()
        # Between the judgement and here the lease may have been called back, or have run out.
        if not self._leases.may_publish(leader, lease, self._clock()):
            return
        number = self._published[0] + 1
        self._published = number, weights
        if self._head is not None and self._head[0] == leader:
            self._head = leader, weights
        self.tally.published += 1
        self._versions.put_nowait(Version(number, weights, judged.length))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
