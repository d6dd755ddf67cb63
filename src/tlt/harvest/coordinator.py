"""The coordinator talks to trainers and to the owner of the workers. asyncio; no Ray, no torch.

`Leases` decides which workers may train, `Rounds` what the trainers do. The coordinator passes
events to both, and carries out their actions. A call of a trainer that fails costs that trainer:
another process takes its place. Any other exception is a bug, after which the state cannot be
trusted. It goes to `on_failure`, the coordinator kills all trainers, and every worker is free for
good. No method raises it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tlt.config.train import TltConfig
from tlt.harvest.contract import TrainerFailed, TrainerGone, TrainerHandle, Version, Weights
from tlt.harvest.leases import STOP_S, Begin, End, Freed, Kill, Leases, LeaseSettings
from tlt.harvest.rounds import REST_S, Held, Member, Publish, Release, Rounds, Settle, Tally, Train
from tlt.spans import Span, SpanLog

logger = logging.getLogger(__name__)

Event = Callable[[], None]
"""Tells `Leases` or `Rounds` what has happened."""

RETRY_S = 30.0
"""Seconds after which a trainer that did not start is tried again."""
START_S = 300.0
"""Seconds in which a trainer must have started."""
EXPORT_S = 1.0
"""Seconds to wait for another trainer's weights: its core may be busy with other things."""
ANSWER_S = 5.0
"""Seconds that it may take to free a worker, besides stopping its trainer, and to end all
trainers."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator: leases, rounds, and whether it publishes."""

    leases: LeaseSettings
    session_s: float
    """Seconds of training between two evaluations."""
    publish: bool
    """False does all the work, but publishes nothing."""


def coordinator_settings(
    tlt: TltConfig, publish: bool, stop_timeout_s: float = STOP_S
) -> CoordinatorSettings:
    """Return the coordinator's part of a run's settings.

    `stop_timeout_s` holds unless the run sets another.
    """
    return CoordinatorSettings(
        leases=LeaseSettings(
            min_s=tlt.min_lease_s,
            lease_s=tlt.lease_s,
            stop_timeout_s=tlt.stop_timeout_s or stop_timeout_s,
            max_leases=tlt.max_trainers,
        ),
        session_s=tlt.session_s,
        publish=publish,
    )


def now_s() -> float:
    """Return the time of the event loop."""
    return asyncio.get_running_loop().time()


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _log_failure(error: BaseException) -> None:
    logger.error("harvest is off for the rest of the run (%r)", error, exc_info=error)


@dataclass(eq=False, slots=True)
class _Lease(Held):
    """A lease as the coordinator carries it out."""

    started_s: float = field(default_factory=now_s)
    called_back_s: asyncio.Future[float] = field(default_factory=_future)
    """The time at which the lease is called back."""
    killed: bool = False


class Coordinator:
    """Leases idle workers to trainers, and hands out better drafters; `tlt.Harvest` to others."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        spawn: Callable[[str], TrainerHandle],
        on_failure: Callable[[BaseException], None] = _log_failure,
        first_version: int = 0,
    ) -> None:
        self._spawn = spawn
        self._on_failure = on_failure
        self._free_s = settings.leases.stop_timeout_s + ANSWER_S
        self._leases = Leases(settings.leases)
        self._leases.enabled = False  # until there is data to learn from
        self._rounds = Rounds(settings.session_s, settings.publish, self._leases, first_version)
        self._members: dict[str, Member] = {}
        self._held: dict[int, _Lease] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        """Ends all trainers, after a failure or at the end."""
        self._versions: asyncio.Queue[Version | None] = asyncio.Queue()
        """The last published drafter, until the session takes it; None: no other follows."""
        self._spans: dict[str, SpanLog] = {}

    @property
    def enabled(self) -> bool:
        """Whether there is harvest: not after a failure or the end."""
        return self._ending is None

    @property
    def tally(self) -> Tally:
        return self._rounds.tally

    # --- what the run says --------------------------------------------------------------------

    def join(self, worker: str) -> None:
        """Start a trainer beside a worker; a worker that has moved gets another trainer."""
        if worker in self._members:
            self._event(lambda: self._start(self._replace(self._members[worker])))
        else:
            self._event(lambda: self._begin_trainer(worker))

    def idle(self, worker: str, for_s: float = math.inf) -> None:
        """Note that the worker has nothing to generate, probably for `for_s` seconds."""
        self._event(lambda: self._leases.idle(worker, now_s(), now_s() + for_s))

    async def needed(self, worker: str) -> None:
        """Call the worker back; return when its device is free.

        A worker that is not free in time is a failure: all trainers are killed.
        """
        if self.enabled:
            freed = _future()
            self._waiting.setdefault(worker, []).append(freed)
            try:
                async with asyncio.timeout(self._free_s):
                    self._event(lambda: self._leases.needed(worker, now_s()))
                    await freed
            except TimeoutError as error:
                self.fail(error)
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def policy_changed(self, version: int, head_and_embedding: Any) -> None:
        """Set the policy that samples come from now; its states are in the buffers."""
        self._leases.enabled = self.enabled
        self._event(lambda: self._rounds.follow(Weights(version, head_and_embedding)))

    async def next_version(self, timeout_s: float | None = None) -> Version | None:
        """Return the next drafter to publish; None if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._versions.get()
        except TimeoutError:
            return None

    def arrived(self, version: Version, blob: Any) -> None:
        """Note that the run has the weights of a published drafter; trainers get `blob`."""
        self._event(lambda: self._rounds.arrived(version, blob))

    def lost(self, version: Version) -> None:
        """Note that the weights of a published drafter are lost: continue without them."""
        self._event(lambda: self._rounds.lost(version))

    async def optimizer_state(self) -> Any:
        """Return the state of the drafter's optimizer; None if nothing was learned yet."""
        head = self._rounds.head if self.enabled else None
        return None if head is None else await head.trainer.optimizer_state()

    def metrics(self) -> dict[str, float]:
        """Return totals since the coordinator started."""
        return {
            **asdict(self.tally),
            **asdict(self._leases.counts),
            "trainers": len(self.leased()),
            "ready": self._leases.num_ready,
        }

    def leased(self) -> list[str]:
        """Return the workers that train now."""
        return self._leases.leased() if self.enabled else []

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when every worker trained since the last call, by the event loop's clock."""
        spans, self._spans = self._spans, {}
        return {worker: log.take() for worker, log in spans.items()}

    # --- the end ------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Turn harvest off after an error: its state cannot be trusted."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
            self._on_failure(error)

    async def shutdown(self) -> None:
        """Stop all work, and return when no trainer is left."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        """Kill all trainers within a limit, then free all workers."""
        self._leases.enabled = False
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        kills = [asyncio.create_task(m.trainer.kill()) for m in self._members.values()]
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*kills)
        except Exception:
            logger.exception("harvest's trainers did not shut down cleanly")
        for worker in list(self._waiting):
            self._freed(worker)
        self._versions.put_nowait(None)

    # --- events and actions -------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        """Note an event, and carry out what follows from it."""
        if self.enabled:
            try:
                event()
                self._carry_out()
            except Exception as error:
                self.fail(error)

    def _carry_out(self) -> None:
        for action in self._leases.actions(now_s()):
            match action:
                case Begin():
                    lease = _Lease(action.lease, self._members[action.worker])
                    self._held[action.lease] = lease
                    self._start(self._under(lease, partial(self._begin, lease, action.seconds)))
                case End():
                    self._call_back(action)
                case Kill():
                    self._kill(action)
                case Freed():
                    self._freed(action.worker)
        for decided in self._rounds.actions():
            match decided:
                case Train():
                    self._start(self._under(decided.held, partial(self._train, decided)))
                case Settle():
                    self._start(self._under(decided.held, partial(self._settle, decided)))
                case Release():
                    self._start(self._under(decided.held, partial(self._release, decided)))
                case Publish():
                    while not self._versions.empty():
                        self._versions.get_nowait()  # an older one is useless
                    self._versions.put_nowait(decided.version)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = min(self._leases.next_s(), self._rounds.next_s())
        if next_s < math.inf:
            delay_s = max(0.0, next_s - now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._event, self._tick)

    def _tick(self) -> None:
        self._leases.tick(now_s())
        self._rounds.tick(now_s())

    def _freed(self, worker: str) -> None:
        for freed in self._waiting.pop(worker, []):
            if not freed.done():
                freed.set_result(None)

    def _call_back(self, action: End) -> None:
        if (lease := self._held.get(action.lease)) is not None:
            if not lease.called_back_s.done():
                lease.called_back_s.set_result(now_s())
                self._rounds.called_back(lease)
            self._start(self._tell_end(lease))

    async def _tell_end(self, held: Held) -> None:
        with suppress(TrainerFailed):  # its lease notices
            await held.member.trainer.end(held.lease)

    def _kill(self, action: Kill) -> None:
        """Kill the process that had this lease, even if another has taken its place since.

        Its unanswered call then fails, and that ends the lease.
        """
        if (lease := self._held.get(action.lease)) is not None and not lease.killed:
            lease.killed = True
            logger.warning("the trainer of %s did not stop in time and is killed", action.worker)
            self._start(self._replace(lease.member))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # --- trainers -----------------------------------------------------------------------------

    def _begin_trainer(self, worker: str) -> None:
        self._members[worker] = member = Member(worker, self._spawn(worker))
        self._start(self._await_ready(member))

    async def _await_ready(self, member: Member) -> None:
        try:
            async with asyncio.timeout(START_S):
                await member.trainer.start()
        except (TrainerFailed, TimeoutError) as error:
            if self._members[member.worker] is member:
                self.tally.faults += 1
                logger.warning(
                    "failed to start a trainer on %s (%r); will retry", member.worker, error
                )
                await asyncio.sleep(RETRY_S)
                await self._replace(member)
            return
        if self._members[member.worker] is member:
            self._event(lambda: self._leases.set_ready(member.worker, True))

    async def _replace(self, member: Member) -> None:
        """Start another process for a trainer that is dead or does not answer."""
        current = self._members[member.worker] is member
        if current:
            self._leases.set_ready(member.worker, False)
        await member.trainer.kill()
        if current and self._members[member.worker] is member:
            self.tally.trainer_restarts += 1
            self._rounds.replaced(member)
            self._begin_trainer(member.worker)

    # --- work under a lease -------------------------------------------------------------------

    async def _under(self, held: Held, work: Callable[[], Awaitable[Event]]) -> None:
        """Carry out a piece of work, and note what it returns; its failure costs the trainer.

        Nothing else ends the lease: no device counts as free that may not be.
        """
        try:
            event = await work()
        except TrainerFailed as error:
            how = "died" if isinstance(error, TrainerGone) else f"failed ({error!r})"
            logger.warning("the trainer of %s %s; another one starts", held.member.worker, how)
            # It may still hold the device, so another process takes its place.
            await self._replace(held.member)
            self._event(lambda: self._failed(held))
            return
        self._event(event)

    async def _begin(self, held: Held, seconds: float) -> Event:
        if await held.member.trainer.begin(held.lease, seconds):
            return lambda: self._rounds.begun(held, now_s())
        return lambda: self._ended(held, 0.0)

    async def _train(self, action: Train) -> Event:
        held, trainer, base = action.held, action.held.member.trainer, action.base
        if action.source is not None:
            blob = await self._exported(action.source, held)
            if blob is not None:
                base = self._rounds.head_arrived(action.source_version, blob)
        await trainer.take(base, action.published, action.policy)
        started_s = now_s()
        trained = await trainer.train(held.lease, max(0.0, action.until_s - started_s))
        seconds = now_s() - started_s
        return lambda: self._rounds.trained(held, trained, seconds, now_s())

    async def _settle(self, action: Settle) -> Event:
        held, trainer, started_s = action.held, action.held.member.trainer, now_s()
        exports = [self._exported(other.member, held) for other, _ in action.others]
        blobs = zip(await asyncio.gather(*exports), action.others, strict=True)
        others = [(blob, share) for blob, (_, share) in blobs if blob is not None]
        seconds = action.seconds / 2 if action.others else action.seconds
        merged = bool(others) and await trainer.merge(
            held.lease, others, action.own_weight, seconds
        )
        if action.published is not None:
            await trainer.take(None, action.published, None)
        evaluation = await trainer.evaluate(held.lease, seconds)
        spent_s = now_s() - started_s
        blob = None if evaluation is None else await self._exported(held.member, held)
        return lambda: self._rounds.settled(held, merged, evaluation, blob, spent_s, now_s())

    async def _release(self, action: Release) -> Event:
        await action.held.member.trainer.release()
        return lambda: self._ended(action.held, action.rest_s)

    async def _exported(self, source: Member, held: Held) -> Any:
        """Return a trainer's weights; None if they do not come soon, or the lease is over."""
        export = asyncio.create_task(source.trainer.export())
        awaited = {export, self._held[held.lease].called_back_s}
        try:
            await asyncio.wait(awaited, timeout=EXPORT_S, return_when=asyncio.FIRST_COMPLETED)
            with suppress(TrainerFailed):
                return export.result() if export.done() else None
            return None
        finally:
            export.cancel()

    def _failed(self, held: Held) -> None:
        self._rounds.failed(held, now_s())
        self._ended(held, REST_S)

    def _ended(self, held: Held, rest_s: float) -> None:
        """End a lease whose trainer has certainly stopped."""
        lease, ended_s, worker = self._held.pop(held.lease), now_s(), held.member.worker
        if lease.called_back_s.done():
            stop_s = ended_s - lease.called_back_s.result()
            self.tally.stop_max_s = max(self.tally.stop_max_s, stop_s)
        self._leases.ended(worker, held.lease, ended_s, rest_s)
        self._spans.setdefault(worker, SpanLog()).add(Span("training", lease.started_s, ended_s))
