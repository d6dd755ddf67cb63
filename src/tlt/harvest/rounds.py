"""Rounds of training, and the lineage of the drafter's weights. asyncio; no Ray, no torch.

In a round all trainers that hold a lease start from the same weights and train for a few seconds.
Then one of them, the leader, averages the results, evaluates the average on held-out samples, and
publishes it if it is better than the published drafter. A trainer that is late, dead or called back
in the middle is left out. A worker leased alone is a round of one.

Every set of weights has a version. The newest version is the `head`: it stays with the trainer that
learned it, published or not. A trainer that goes on from the head gets its weights from that
trainer, or the newest weights that are known here. A trainer is never sent a version that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from tlt.harvest.leases import Leases

logger = logging.getLogger(__name__)

REST_S = 5.0
"""Seconds without a lease for a trainer that failed, or has nothing to learn from."""
GRACE_S = 1.0
"""Seconds that a round waits after its end for members that have not answered."""
EXPORT_S = 1.0
"""Seconds to wait for another trainer's weights: its core may be busy with other things."""
MAX_BROKEN_OFF = 2
"""Evaluations broken off in a row until more training comes first: leases may be too short."""
EVALUATED_SHARE = 0.15
"""Seconds of evaluating and merging per second of training, over many rounds."""


def now_s() -> float:
    """Return the time of the event loop."""
    return asyncio.get_running_loop().time()


class TrainerFailed(RuntimeError):
    """A call of a trainer failed."""


class TrainerGone(TrainerFailed):
    """The trainer's process is dead."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a drafter or of a policy's ends."""

    version: int
    """Version of a drafter; 0 is the drafter that the engines started with. Of a policy, the
    policy's version."""
    blob: Any = None
    """The tensors, or where they are: opaque here. None for version 0."""


@dataclass(frozen=True, slots=True)
class Version:
    """A drafter for the engines."""

    number: int
    """Number of drafters published in this run and in those that it resumes."""
    weights: Weights
    length: float
    """Expected tokens per draft on held-out samples."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a piece of training."""

    num_steps: int
    num_tokens: int
    loss: float
    starved: bool
    """Whether there was nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The drafter compared with the published one on the same held-out samples."""

    better: bool
    length: float
    """Expected tokens per verified draft."""
    published_length: float


class TrainerHandle(Protocol):
    """A `HarvestTrainer` elsewhere; a call that fails raises `TrainerFailed`."""

    async def start(self) -> None:
        """Return when the trainer can take a lease."""
        ...

    async def begin(self, lease: int, seconds: float) -> bool: ...
    async def end(self, lease: int) -> None: ...
    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None: ...
    async def train(self, lease: int, seconds: float) -> Trained: ...
    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None: ...
    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool: ...
    async def export(self) -> Any: ...
    async def moments(self) -> Any: ...
    async def release(self) -> None: ...
    async def kill(self) -> None:
        """Return when the process is gone."""
        ...


@dataclass(slots=True)
class Tally:
    """Totals of harvest since the coordinator started."""

    trained_tokens: int = 0
    trained_steps: int = 0
    used_s: float = 0.0
    """Worker seconds of training, evaluating and merging."""
    evaluated_s: float = 0.0
    """Worker seconds of evaluating and merging."""
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


@dataclass(eq=False, slots=True)
class Member:
    """A trainer's process beside a worker, and the versions of weights that it has."""

    worker: str
    trainer: TrainerHandle
    base: int | None = 0
    """Version of the drafter; None once the trainer has trained it further."""
    published: int = 0
    policy: int = 0


@dataclass(eq=False, slots=True)
class Held:
    """A lease that a trainer works under."""

    lease: int
    member: Member
    called_back: asyncio.Event = field(default_factory=asyncio.Event)
    ending_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    """The newest version, the trainer that learned it, and its weights if they are known here."""

    member: Member
    version: int
    weights: Weights | None = None


class _Round:
    def __init__(self, started_s: float, ends_s: float) -> None:
        self.started_s = started_s
        self.ends_s = ends_s
        self.members: set[Held] = set()
        """Leases whose trainers are at work."""
        self.results: dict[str, tuple[Held, Trained]] = {}
        """Lease and result by worker, of trainers that are done or were called back."""
        self.leader: Held | None = None
        """The lease of the trainer that makes one drafter of the results."""
        self.closed = asyncio.Event()
        self.changed = asyncio.Event()


class Rounds:
    """Lets the trainers that hold leases work together. The coordinator owns leases and tally."""

    def __init__(
        self,
        session_s: float,
        publish: bool,
        leases: Leases,
        tally: Tally,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._session_s = session_s
        self._publish = publish
        self._leases = leases
        self._tally = tally
        self._start = start
        self._members: dict[str, Member] = {}
        self._round: _Round | None = None
        self._unevaluated_s = 0.0
        """Seconds trained since the last evaluation, carried over from short leases."""
        self._num_broken_off = 0
        self._evaluation_left_s = 0.0
        """Seconds of evaluating that the training so far has earned, less those spent."""
        self._versions = itertools.count(1)
        self._head: _Head | None = None
        self._known = Weights(0)
        """The newest weights of a head that are known here."""
        self._policy = Weights(0)
        self._published_number, self._published = 0, Weights(0)
        self.new_versions: asyncio.Queue[Version | None] = asyncio.Queue()
        """The last published drafter, until somebody takes it; None says that no other follows."""

    def enter(self, worker: str, trainer: TrainerHandle) -> Member:
        """Return a member for the worker's new trainer, which has version 0 of everything."""
        if self._head is not None and self._head.member.worker == worker:
            self._head = None  # lost with its trainer; its weights may still be known
        self._members[worker] = member = Member(worker, trainer)
        return member

    def start_from(self, number: int, blob: Any) -> None:
        """Set the drafter that the engines have; None is the one that they started with."""
        self._published_number = number
        if blob is not None:
            self._published = self._known = Weights(next(self._versions), blob)

    def follow(self, policy: Weights) -> None:
        """Set the policy that samples come from."""
        self._policy = policy

    async def moments(self) -> Any:
        """Return the optimizer's state of the head's trainer; None if nothing was learned yet."""
        return None if self._head is None else await self._head.member.trainer.moments()

    async def work(self, held: Held) -> float:
        """Train round after round until the lease ends; return how long to rest afterwards."""
        member = held.member
        while self._holds(held):
            current = self._join_round(held)
            try:
                await self._bring_up_to_date(held)
                member.base = None
                started_s = now_s()
                seconds = max(0.0, current.ends_s - started_s)
                trained = await member.trainer.train(held.lease, seconds)
                self._count(trained, started_s)
                if trained.num_steps or self._unevaluated_s:
                    current.results[member.worker] = held, trained
            finally:
                current.members.discard(held)
                current.changed.set()
            if trained.starved:
                return REST_S
            await _first_of(current.closed, held.called_back)
            if current.leader is held:
                await current.closed.wait()  # it may still be evaluating, if not for long
        return 0.0

    def _holds(self, held: Held) -> bool:
        return self._leases.lease_of(held.member.worker) == held.lease

    def _count(self, trained: Trained, started_s: float) -> None:
        self._tally.used_s += now_s() - started_s
        self._unevaluated_s += now_s() - started_s
        self._tally.trained_tokens += trained.num_tokens
        self._tally.trained_steps += trained.num_steps
        if trained.num_steps:
            self._tally.loss = trained.loss

    # --- weights for a trainer ----------------------------------------------------------------

    async def _bring_up_to_date(self, held: Held) -> None:
        """Send the trainer the weights that it does not have."""
        member, policy = held.member, self._policy
        base = await self._base_for(held)
        if base is not None and base.version == member.base:
            base = None
        news = None if member.policy == policy.version else policy
        published = self._published
        await member.trainer.take(base, _news(member.published, published), news)
        member.policy, member.published = policy.version, published.version

    async def _base_for(self, held: Held) -> Weights | None:
        """Return the head's weights or the newest known; None is what the trainer has."""
        head = self._head
        if head is None:
            return self._known
        if held.member.base == head.version:
            return None
        if head.weights is not None:
            return head.weights
        if head.member is held.member:
            return None
        blob = await _exported(head.member.trainer, held.called_back)
        if blob is None:
            return self._known
        weights = Weights(head.version, blob)
        if self._head is head:
            self._head = _Head(head.member, head.version, weights)
            self._known = weights
        return weights

    def _set_head(self, member: Member) -> None:
        member.base = version = next(self._versions)
        self._head = _Head(member, version)

    # --- one round ----------------------------------------------------------------------------

    def _join_round(self, held: Held) -> _Round:
        if self._round is None:
            left_s = max(0.0, self._session_s - self._unevaluated_s)
            self._round = _Round(now_s(), now_s() + left_s)
            self._start(self._close(self._round))
        self._round.members.add(held)
        return self._round

    async def _close(self, current: _Round) -> None:
        """Wait for the members, then make one drafter of their results."""
        try:
            while current.members:
                # The first result is waited for, however late; the others only for a while.
                current.changed.clear()
                left_s = current.ends_s + GRACE_S - now_s()
                if left_s <= 0 and current.results:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, GRACE_S)):
                        await current.changed.wait()
            if self._round is current:
                self._round = None  # a trainer that comes now starts the next one
            await self._settle(current)
        except TrainerGone:
            self._tally.faults += 1  # the lease of that trainer sees to it
        except TrainerFailed as error:
            logger.warning("a round of drafter training was lost (%r)", error)
            self._tally.faults += 1
        finally:
            if self._round is current:
                self._round = None
            current.closed.set()

    async def _settle(self, current: _Round) -> None:
        self._evaluation_left_s += EVALUATED_SHARE * (now_s() - current.started_s)
        found = current.results.values()
        results = {held: trained for held, trained in found if self._holds(held)}
        if not results:
            # All were called back in the middle: the one that got furthest keeps its weights.
            tokens = {
                held.member: trained.num_tokens
                for held, trained in found
                if self._members[held.member.worker] is held.member
            }
            if tokens:
                self._set_head(max(tokens, key=lambda member: tokens[member]))
            return
        leader = current.leader = next(iter(results))
        member = leader.member
        if self._evaluation_left_s <= 0:
            # The last evaluation took longer than it should: train another round first.
            self._set_head(member)
            self._unevaluated_s = 0.0
            return
        started_s = now_s()
        try:
            evaluation = await self._evaluated(results, leader)
        finally:
            spent_s = now_s() - started_s
            self._evaluation_left_s -= spent_s
            self._tally.evaluated_s += spent_s
            self._tally.used_s += spent_s
        self._set_head(member)
        self._num_broken_off = self._num_broken_off + 1 if evaluation is None else 0
        if evaluation is not None or self._num_broken_off >= MAX_BROKEN_OFF:
            self._unevaluated_s, self._num_broken_off = 0.0, 0
        if evaluation is not None:
            self._tally.length = evaluation.length
            await self._keep(leader, evaluation)

    async def _evaluated(self, results: dict[Held, Trained], leader: Held) -> Evaluation | None:
        """Merge the results and compare them with the published drafter, in the time earned."""
        member, left_s = leader.member, self._evaluation_left_s
        if len(results) > 1:
            await self._merge(results, leader, left_s / 2)
            left_s /= 2
        if (published := _news(member.published, self._published)) is not None:
            await member.trainer.take(None, published, None)
            member.published = published.version
        return await member.trainer.evaluate(leader.lease, left_s)

    async def _merge(self, results: dict[Held, Trained], leader: Held, seconds: float) -> None:
        """Average the results of the others into the leader's weights."""
        others = [held for held in results if held is not leader]
        blobs = await asyncio.gather(
            *(_exported(held.member.trainer, leader.called_back) for held in others)
        )
        arrived = [
            (blob, float(results[held].num_tokens))
            for held, blob in zip(others, blobs, strict=True)
            if blob is not None
        ]
        own_weight, trainer = results[leader].num_tokens, leader.member.trainer
        if arrived and await trainer.merge(leader.lease, arrived, own_weight, seconds):
            self._tally.merges += 1

    async def _keep(self, leader: Held, evaluation: Evaluation) -> None:
        """Remember the head's weights, and publish them if they are better."""
        head = self._head
        assert head is not None
        blob = await _exported(leader.member.trainer, leader.called_back)
        if blob is None:
            return
        weights = Weights(head.version, blob)
        if self._head is head:
            self._head = _Head(head.member, head.version, weights)
        self._known = weights
        if not evaluation.better:
            self._tally.refused += 1
        # Between the evaluation and here the lease may have been called back, or have run out.
        elif self._publish and self._leases.may_publish(
            leader.member.worker, leader.lease, now_s()
        ):
            self._published_number, self._published = self._published_number + 1, weights
            self._tally.published += 1
            while not self.new_versions.empty():
                self.new_versions.get_nowait()  # nobody wants an older one
            version = Version(self._published_number, weights, evaluation.length)
            self.new_versions.put_nowait(version)


def _news(has: int, weights: Weights) -> Weights | None:
    """Return weights for a trainer that has this version; None if it has the same."""
    return None if has == weights.version else weights


async def _exported(trainer: TrainerHandle, called_back: asyncio.Event) -> Any:
    """Return a trainer's weights; None if they do not come soon, or the lease is called back."""
    export = asyncio.create_task(trainer.export())
    back = asyncio.create_task(called_back.wait())
    try:
        await asyncio.wait({export, back}, timeout=EXPORT_S, return_when=asyncio.FIRST_COMPLETED)
        with suppress(TrainerFailed):
            return export.result() if export.done() else None
        return None
    finally:
        back.cancel()
        export.cancel()


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
