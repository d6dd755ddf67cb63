"""Carries leases out: trainers begin, work in rounds, and stop. asyncio only; Ray stays in `run`.

A round: all trainers that hold a lease start from the same weights and train for a few seconds;
then their results are averaged, judged on held-out samples, and published if they are better.
Whoever is late, dead or called back in the middle is left out. A worker leased alone is a round of
one.

What was learned last, published or not, stays with the trainer that learned it, the `head`; another
one that goes on from there asks for its weights, or takes the last ones that are known.
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
from tlt.spans import Span, SpanLog

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""A trainer that does not start is tried again after this time."""
REST_S = 5.0
"""After a failure, or with nothing to learn, a trainer gets no lease for this long."""
GRACE_S = 1.0
"""How long after its end a round waits for members that have not answered."""
EXPORT_S = 1.0
"""How long to wait for another trainer's weights: its core may be busy with other things."""
JUDGEMENTS_BROKEN_OFF = 2
"""After so many in a row there is more training first: leases may be too short to judge in."""
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
    """A `HarvestTrainer` elsewhere; a dead one raises `TrainerGone`. Weights are opaque here."""

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


@dataclass(frozen=True, slots=True)
class _Head:
    """Who learned last, and the weights as far as they are known here."""

    worker: str
    trainer: TrainerHandle
    weights: Any = None


class _Round:
    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.members: set[str] = set()
        """Those at work."""
        self.results: dict[str, tuple[int, TrainerHandle, Trained]] = {}
        """Lease, trainer and result of those that are done, or were called back."""
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
        self._unjudged_s = 0.0
        """Of training since the last judgement. Where leases are short, it takes several of them to
        learn something worth judging; the next lease then begins with that."""
        self._num_broken_off = 0
        self._head: _Head | None = None
        self._known: Any = "start"
        """The last weights of a head that are known here."""
        self._at_head: set[str] = set()
        """Trainers whose weights are those of the head."""
        self._policy: tuple[int, Any] = (0, None)
        self._published: tuple[int, Any] = (0, None)
        self._has: dict[str, dict[str, int]] = {}
        """Which policy and which published drafter a trainer has."""
        self._versions: asyncio.Queue[Version] = asyncio.Queue()
        self._ending_since: dict[int, float] = {}
        self._called_back: dict[int, asyncio.Event] = {}
        self._lease_trainers: dict[int, TrainerHandle] = {}
        self._stops: deque[float] = deque(maxlen=KEEP_STOPS)
        self._spans: dict[str, SpanLog] = {}
        self.tally = Tally()

    # --- what the run says --------------------------------------------------------------------

    def join(self, worker: str) -> None:
        """A worker, beside which a trainer starts; one that has moved gets another trainer."""
        if worker in self._trainers:
            self._start(self._replace(worker, self._trainers[worker]))
        else:
            self._begin_trainer(worker)

    def start_from(self, version: int, weights: Any) -> None:
        """The drafter that the engines have; None is the one they started with."""
        self._published = version, weights
        if weights is not None:
            self._known = weights

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

    def leased(self) -> list[str]:
        """Workers that train now."""
        return self._leases.leased()

    def take_spans(self) -> dict[str, list[Span]]:
        """When every worker trained since the last call, by the coordinator's clock."""
        spans, self._spans = self._spans, {}
        return {worker: log.take() for worker, log in spans.items()}

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
                self._kill(action)
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

    def _kill(self, action: Kill) -> None:
        """The process that has the lease, whoever has taken its place since."""
        trainer = self._lease_trainers.pop(action.lease, None)
        if trainer is not None:
            logger.warning("the trainer of %s does not stop and is killed", action.worker)
            self._start(self._replace(action.worker, trainer))

    def _begin_trainer(self, worker: str) -> None:
        self._trainers[worker] = trainer = self._spawn(worker)
        self._has[worker] = {}
        self._start(self._await_ready(worker, trainer))

    async def _await_ready(self, worker: str, trainer: TrainerHandle) -> None:
        try:
            await trainer.start()
        except Exception as error:
            if self._trainers.get(worker) is trainer:
                self.tally.faults += 1
                logger.warning("no trainer starts beside %s (%r); again later", worker, error)
                await asyncio.sleep(RETRY_S)
                await self._replace(worker, trainer)
            return
        if self._trainers.get(worker) is trainer:
            self._leases.set_ready(worker, True)
            self._carry_out()

    async def _replace(self, worker: str, trainer: TrainerHandle) -> None:
        """Another process for a trainer that is dead or does not answer."""
        current = self._trainers.get(worker) is trainer
        if current:
            self._leases.set_ready(worker, False)
        await trainer.kill()
        if current and self._trainers.get(worker) is trainer:
            self.tally.trainer_restarts += 1
            self._at_head.discard(worker)
            if self._head is not None and self._head.trainer is trainer:
                self._head = None  # what it learned last is lost; what is known of it is not
            self._begin_trainer(worker)

    # --- one lease ----------------------------------------------------------------------------

    async def _lease(self, begin: Begin) -> None:
        worker, lease = begin.worker, begin.lease
        trainer, rest_s = self._trainers[worker], 0.0
        self._called_back[lease] = asyncio.Event()
        self._lease_trainers[lease] = trainer
        started_s = self._clock()
        try:
            if await trainer.begin(lease, begin.seconds):
                rest_s = await self._work(worker, lease, trainer)
                await trainer.release()
        except TrainerGone:
            logger.warning("the trainer of %s died; another one starts", worker)
            rest_s = await self._failed(worker, trainer)
        except Exception as error:
            # Whether it has let go of the device is not known: another process has.
            logger.warning("the trainer of %s failed (%r); another one starts", worker, error)
            rest_s = await self._failed(worker, trainer)
        finally:
            now_s = self._clock()
            del self._called_back[lease]
            self._lease_trainers.pop(lease, None)
            if (since_s := self._ending_since.pop(lease, None)) is not None:
                self._stops.append(now_s - since_s)
                self.tally.stop_max_s = max(self.tally.stop_max_s, now_s - since_s)
            self._leases.ended(worker, lease, now_s, rest_s)
            self._carry_out()
            self._spans.setdefault(worker, SpanLog()).add(Span("training", started_s, now_s))

    async def _failed(self, worker: str, trainer: TrainerHandle) -> float:
        self.tally.faults += 1
        await self._replace(worker, trainer)
        return REST_S

    async def _work(self, worker: str, lease: int, trainer: TrainerHandle) -> float:
        """Round after round until the lease ends; how long to rest afterwards."""
        while self._leases.lease_of(worker) == lease:
            current = self._join_round(worker)
            try:
                await self._bring_up_to_date(worker, lease, trainer)
                self._at_head.discard(worker)
                started_s = self._clock()
                trained = await trainer.train(lease, max(0.0, current.ends_s - started_s))
                self._count(trained, started_s)
                if trained.num_steps or self._unjudged_s:
                    current.results[worker] = lease, trainer, trained
            finally:
                current.members.discard(worker)
                current.changed.set()
            if trained.starved:
                return REST_S
            await _first_of(current.closed, self._called_back[lease])
            if current.leader == worker:
                await current.closed.wait()  # it may still be judging, if not for long
        return 0.0

    async def _bring_up_to_date(self, worker: str, lease: int, trainer: TrainerHandle) -> None:
        policy = base = None
        version, new_policy = self._policy
        if self._has[worker].get("policy", 0) != version:
            policy = new_policy
        if worker not in self._at_head:
            base = await self._base_for(worker, lease)
        await trainer.take(base, self._news_of_published(worker), policy)
        self._has[worker]["policy"] = version

    def _news_of_published(self, worker: str) -> Any:
        """The published drafter, if the trainer does not have it yet."""
        version, weights = self._published
        if self._has[worker].get("published", 0) == version:
            return None
        self._has[worker]["published"] = version
        return weights

    async def _base_for(self, worker: str, lease: int) -> Any:
        """What was learned last, or the last of it that is known; None is what the trainer has."""
        head = self._head
        if head is None:
            return self._known
        if head.weights is not None:
            return head.weights
        if head.worker == worker:
            return None
        weights = await self._exported(head.trainer, self._called_back[lease])
        if weights is None:
            return self._known
        if self._head is head:
            self._head = _Head(head.worker, head.trainer, weights)
            self._known = weights
        return weights

    async def _exported(self, trainer: TrainerHandle, called_back: asyncio.Event) -> Any:
        """Another trainer's weights; None if they do not come soon, or the lease is called back."""
        export = asyncio.create_task(trainer.export())
        back = asyncio.create_task(called_back.wait())
        await asyncio.wait({export, back}, timeout=EXPORT_S, return_when=asyncio.FIRST_COMPLETED)
        back.cancel()
        if not export.done():
            export.cancel()
            return None
        return None if export.exception() is not None else export.result()

    def _count(self, trained: Trained, started_s: float) -> None:
        self.tally.used_s += self._clock() - started_s
        self._unjudged_s += self._clock() - started_s
        self.tally.trained_tokens += trained.num_tokens
        self.tally.trained_steps += trained.num_steps
        if trained.num_steps:
            self.tally.loss = trained.loss

    # --- rounds -------------------------------------------------------------------------------

    def _join_round(self, worker: str) -> _Round:
        if self._round is None:
            left_s = max(0.0, self._settings.session_s - self._unjudged_s)
            self._round = _Round(self._clock() + left_s)
            self._start(self._close(self._round))
        self._round.members.add(worker)
        return self._round

    async def _close(self, current: _Round) -> None:
        """Wait for the members, then make one drafter of what they learned."""
        try:
            while current.members:
                # The first result is waited for, however late; the others only for a while.
                current.changed.clear()
                left_s = current.ends_s + GRACE_S - self._clock()
                if left_s <= 0 and current.results:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, GRACE_S)):
                        await current.changed.wait()
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
            worker: (lease, trainer, trained)
            for worker, (lease, trainer, trained) in current.results.items()
            if self._leases.lease_of(worker) == lease
        }
        if not holding:
            # All were called back in the middle: the one that got furthest keeps what it has.
            tokens = {
                worker: trained.num_tokens
                for worker, (_, trainer, trained) in current.results.items()
                if self._trainers.get(worker) is trainer
            }
            if tokens:
                self._set_head(max(tokens, key=lambda worker: tokens[worker]))
            return
        leader = current.leader = next(iter(holding))
        lease, trainer, _ = holding[leader]
        started_s = self._clock()
        if len(holding) > 1:
            await self._merge(holding, leader)
        if (published := self._news_of_published(leader)) is not None:
            await trainer.take(None, published, None)
        judged = await trainer.judge(lease)
        self._set_head(leader)
        self._num_broken_off = self._num_broken_off + 1 if judged is None else 0
        if judged is not None or self._num_broken_off >= JUDGEMENTS_BROKEN_OFF:
            self._unjudged_s, self._num_broken_off = 0.0, 0
        if judged is not None:
            self.tally.length = judged.length
            await self._keep(leader, lease, trainer, judged)
        self.tally.used_s += self._clock() - started_s

    async def _merge(
        self, holding: dict[str, tuple[int, TrainerHandle, Trained]], leader: str
    ) -> None:
        """Average what the others learned into the leader's weights."""
        lease, trainer, trained = holding[leader]
        others = [member for worker, member in holding.items() if worker != leader]
        called_back = self._called_back[lease]
        exports = await asyncio.gather(
            *(self._exported(other, called_back) for _, other, _ in others)
        )
        arrived = [
            (weights, float(other.num_tokens))
            for (_, _, other), weights in zip(others, exports, strict=True)
            if weights is not None
        ]
        if arrived and await trainer.merge(lease, arrived, trained.num_tokens):
            self.tally.merges += 1

    def _set_head(self, worker: str) -> None:
        self._head = _Head(worker, self._trainers[worker])
        self._at_head = {worker}

    async def _keep(self, leader: str, lease: int, trainer: TrainerHandle, judged: Judged) -> None:
        """Remember what was learned, and publish it if it is better."""
        head = self._head
        weights = await self._exported(trainer, self._called_back[lease])
        if weights is None:
            return
        if self._head is head:
            self._head = _Head(leader, trainer, weights)
        self._known = weights
        if not judged.better:
            self.tally.refused += 1
        # Between the judgement and here the lease may have been called back, or have run out.
        elif self._settings.publish and self._leases.may_publish(leader, lease, self._clock()):
            self._published = self._published[0] + 1, weights
            self._has[leader]["published"] = -1  # to be told: it is judged by its own copy
            self.tally.published += 1
            while not self._versions.empty():
                self._versions.get_nowait()  # nobody wants the one before
            self._versions.put_nowait(Version(self._published[0], weights, judged.length))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
