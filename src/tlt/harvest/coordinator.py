"""The coordinator carries leases out: trainers start, begin, stop and are killed.

An object of the driver's event loop; asyncio, no Ray, no torch. `Leases` decides, `Rounds` lets the
leased trainers work together. A call of a trainer that fails costs that trainer. Any other
exception ends the coordinator: a method raises it, a task or timer reports it to `on_failure`.
Whoever awaits `needed` then gets the exception, and `shutdown` kills the trainers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tlt.config.train import TltConfig
from tlt.harvest.leases import Begin, End, Kill, Leases, LeaseSettings
from tlt.harvest.release import STOP_S
from tlt.harvest.rounds import (
    REST_S,
    Held,
    Member,
    Rounds,
    Tally,
    TrainerFailed,
    TrainerGone,
    TrainerHandle,
    Version,
    Weights,
    now_s,
)
from tlt.spans import Span, SpanLog

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds after which a trainer that did not start is tried again."""
START_S = 300.0
"""Seconds in which a trainer must have started."""


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


class CoordinatorEnded(RuntimeError):
    """The coordinator was shut down."""


def _log_failure(error: BaseException) -> None:
    logger.error("the coordinator failed", exc_info=error)


class Coordinator:
    """Leases idle workers to trainers, and hands out better drafters; `tlt.Harvest` to others."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        spawn: Callable[[str], TrainerHandle],
        on_failure: Callable[[BaseException], None] = _log_failure,
    ) -> None:
        self._spawn = spawn
        self._on_failure = on_failure
        self._leases = Leases(settings.leases)
        self._leases.enabled = False  # until there is something to learn from
        self._members: dict[str, Member] = {}
        self._held: dict[int, Held] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._spans: dict[str, SpanLog] = {}
        self.tally = Tally()
        self._rounds = Rounds(
            settings.session_s, settings.publish, self._leases, self.tally, self._start
        )

    # --- what the run says --------------------------------------------------------------------

    def join(self, worker: str) -> None:
        """Start a trainer beside a worker; a worker that has moved gets another trainer."""
        if worker in self._members:
            self._start(self._replace(self._members[worker]))
        else:
            self._begin_trainer(worker)

    def start_from(self, number: int, blob: Any) -> None:
        """Set the drafter that the engines have; None is the one that they started with."""
        self._rounds.start_from(number, blob)

    def idle(self, worker: str, for_s: float = math.inf) -> None:
        """Note that the worker has nothing to generate, probably for `for_s` seconds."""
        self._leases.idle(worker, now_s(), now_s() + for_s)
        self._carry_out()

    async def needed(self, worker: str) -> None:
        """Call the worker back; return when its device is free."""
        freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, []).append(freed)
        self._leases.needed(worker, now_s())
        self._carry_out()
        await freed

    def policy_changed(self, version: int, head_and_embedding: Any) -> None:
        """Set the policy that samples come from now; its states are in the buffers."""
        self._rounds.follow(Weights(version, head_and_embedding))
        self._leases.enabled = True
        self._carry_out()

    async def next_version(self, timeout_s: float) -> Version | None:
        """Return the next drafter to publish; None when there is none for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._rounds.new_versions.get()
        except TimeoutError:
            return None

    async def moments(self) -> Any:
        """Return the state of the drafter's optimizer; None if nothing was learned yet."""
        return await self._rounds.moments()

    def metrics(self) -> dict[str, float]:
        """Return totals since the coordinator started."""
        return {
            **asdict(self.tally),
            **asdict(self._leases.counts),
            "trainers": len(self._leases.leased()),
            "ready": self._leases.num_ready,
        }

    def leased(self) -> list[str]:
        """Return the workers that train now."""
        return self._leases.leased()

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when every worker trained since the last call, by the event loop's clock."""
        spans, self._spans = self._spans, {}
        return {worker: log.take() for worker, log in spans.items()}

    async def shutdown(self) -> None:
        """Stop all work, and return when no trainer is left."""
        self._close(CoordinatorEnded("harvest ends"))
        kills = [member.trainer.kill() for member in self._members.values()]
        await asyncio.gather(*kills, *self._tasks, return_exceptions=True)

    # --- carrying out decisions ---------------------------------------------------------------

    def _carry_out(self) -> None:
        if self._closed:
            return
        for action in self._leases.actions(now_s()):
            if isinstance(action, Begin):
                held = Held(action.lease, self._members[action.worker])
                self._held[action.lease] = held
                self._start(self._lease(held, action.seconds))
            elif isinstance(action, End):
                self._call_back(action)
            elif isinstance(action, Kill):
                self._kill(action)
            else:
                for freed in self._waiting.pop(action.worker, []):
                    if not freed.done():
                        freed.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._leases.next_s()
        if next_s < math.inf:
            delay_s = max(0.0, next_s - now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        try:
            self._leases.tick(now_s())
            self._carry_out()
        except Exception as error:
            self._fail(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End a coordinator whose own code failed: its state cannot be trusted any more."""
        if not self._closed:
            self._close(error)
            self._on_failure(error)

    def _close(self, error: BaseException) -> None:
        """Stop everything but the trainers, and tell everybody who waits."""
        self._closed, self._leases.enabled = True, False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for freed in [freed for waiting in self._waiting.values() for freed in waiting]:
            if not freed.done():
                freed.set_exception(error)
        self._waiting.clear()
        self._rounds.new_versions.put_nowait(None)

    # --- trainers -----------------------------------------------------------------------------

    def _begin_trainer(self, worker: str) -> None:
        self._members[worker] = member = self._rounds.enter(worker, self._spawn(worker))
        self._start(self._await_ready(member))

    async def _await_ready(self, member: Member) -> None:
        try:
            async with asyncio.timeout(START_S):
                await member.trainer.start()
        except (TrainerFailed, TimeoutError) as error:
            if self._members[member.worker] is member:
                self.tally.faults += 1
                logger.warning(
                    "no trainer starts beside %s (%r); again later", member.worker, error
                )
                await asyncio.sleep(RETRY_S)
                await self._replace(member)
            return
        if self._members[member.worker] is member:
            self._leases.set_ready(member.worker, True)
            self._carry_out()

    async def _replace(self, member: Member) -> None:
        """Start another process for a trainer that is dead or does not answer."""
        current = self._members[member.worker] is member
        if current:
            self._leases.set_ready(member.worker, False)
        await member.trainer.kill()
        if current and self._members[member.worker] is member:
            self.tally.trainer_restarts += 1
            self._begin_trainer(member.worker)

    # --- one lease ----------------------------------------------------------------------------

    async def _lease(self, held: Held, seconds: float) -> None:
        worker, rest_s, started_s = held.member.worker, 0.0, now_s()
        try:
            rest_s = await self._work(held, seconds)
        except Exception as error:
            # Before the lease ends below: nobody may hear that a device is free that is not.
            self._fail(error)
            raise
        finally:
            ended_s = now_s()
            self._held.pop(held.lease, None)
            if held.ending_since_s is not None:
                stop_s = ended_s - held.ending_since_s
                self.tally.stop_max_s = max(self.tally.stop_max_s, stop_s)
            self._leases.ended(worker, held.lease, ended_s, rest_s)
            self._carry_out()
            self._spans.setdefault(worker, SpanLog()).add(Span("training", started_s, ended_s))

    async def _work(self, held: Held, seconds: float) -> float:
        """Let the trainer work until the lease ends; return how long to rest afterwards."""
        trainer = held.member.trainer
        try:
            if not await trainer.begin(held.lease, seconds):
                return 0.0
            rest_s = await self._rounds.work(held)
            await trainer.release()
            return rest_s
        except TrainerFailed as error:
            # Whether it has let go of the device is not known: another process has.
            how = "died" if isinstance(error, TrainerGone) else f"failed ({error!r})"
            logger.warning("the trainer of %s %s; another one starts", held.member.worker, how)
            self.tally.faults += 1
            await self._replace(held.member)
            return REST_S

    def _call_back(self, action: End) -> None:
        if (held := self._held.get(action.lease)) is not None:
            if held.ending_since_s is None:
                held.ending_since_s = now_s()
            held.called_back.set()
            self._start(self._tell_end(held))

    async def _tell_end(self, held: Held) -> None:
        with suppress(TrainerFailed):  # its lease notices
            await held.member.trainer.end(held.lease)

    def _kill(self, action: Kill) -> None:
        """Kill the process that has the lease, once, whoever has taken its place since."""
        if (held := self._held.pop(action.lease, None)) is not None:
            logger.warning("the trainer of %s does not stop and is killed", action.worker)
            self._start(self._replace(held.member))
