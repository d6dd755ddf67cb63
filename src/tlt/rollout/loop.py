"""The thread that steps one engine, without vLLM.

One thread, the loop, makes every call to the engine's core. Other threads reach the loop in two
ways: the queue of requests, under a lock, and commands, which the loop runs between two engine
steps.

Invariants: a request is either queued here (and can be withdrawn), in flight in the core, or
finished. Each submitted request ends as exactly one `Sample`, unless it is withdrawn. The policy
changes only while nothing is in flight: every sample comes from one policy. A recheck (`recheck`)
is not a request: it runs only while the engine has neither request nor command.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tlt.contracts import WHOLE, Finished, Recheck, Sample, SampleRequest, Text
from tlt.errors import EngineError, WeightMismatch
from tlt.rollout.recheck import Verdict, compare

logger = logging.getLogger(__name__)
T = TypeVar("T")

TEXTS_S = 1.0
"""Seconds between two notes of the texts of running requests."""
Gained = tuple[str, int, tuple[int, ...], tuple[float, ...]]
"""A sample's id, a place in its response, and the tokens and log-probabilities from there on."""


class EngineCore(Protocol):
    """The part of an engine that generates. Only the loop's thread calls it."""

    def start(self) -> dict[str, Any]:
        """Start, and return a report; its `slots` is the number of requests that run at once."""
        ...

    def admit(self, request: SampleRequest) -> None:
        """Take a request in for the next engine step."""
        ...

    def step(self) -> Iterable[Finished]:
        """Run one engine step, and return the requests that it finished."""
        ...

    def gained(self) -> Iterable[Gained]:
        """Return the tokens that running requests have drawn since the last call."""
        ...

    def begin_recheck(self, recheck: Recheck) -> None:
        """Take a recheck in; the engine steps up to its end draft nothing, and count nothing."""
        ...

    def end_recheck(self, recheck: Recheck) -> Mapping[int, float]:
        """Forget a recheck; return by how much the expected token missed the draw, by position."""
        ...

    def stop(self) -> None:
        """Release the core's resources, after the last engine step."""
        ...


@dataclass(eq=False, slots=True)
class _Rechecking:
    recheck: Recheck
    verdict: Future[Verdict | None] = field(default_factory=Future)
    begun: bool = False


class EngineLoop:
    """Queue, commands and finished samples of one engine. Construct it, then `start` it."""

    def __init__(
        self,
        name: str,
        core: EngineCore,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.policy_version = 0
        """Version of the policy that generates; every sample carries it."""
        self._core = core
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._lock = threading.Condition()
        self._queue: deque[tuple[SampleRequest, float]] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._finished: list[Sample] = []
        self._in_flight: dict[str, tuple[float, float]] = {}
        """Each request in flight, when it arrived, and when it left the queue."""
        self._texts: list[tuple[str, int, Text]] = []
        """Progress of running requests since `take_texts`: ids, places in the responses."""
        self._texts_noted_s = clock()
        self._rechecking: _Rechecking | None = None
        self._ended_recheck = ""
        self._slots = 0
        self._stopping = False
        self._turn_started_s: float | None = None
        """When the commands and the engine step under way began; None while there are none."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"tlt-{name}", daemon=True)
        self._ready: Future[dict[str, Any]] = Future()

    # --- for other threads --------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Start the core, and return its report."""
        self._thread.start()
        return self._ready.result()

    def shutdown(self) -> None:
        """Finish the current engine step and stop. Drop queued and running requests."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests, except requests already here: a call may arrive twice."""
        now = time.time()
        with self._lock:
            self._raise_if_dead()
            here = {*self._in_flight, *(request.sample_id for request, _ in self._queue)}
            self._queue.extend((r, now) for r in requests if r.sample_id not in here)
            self._lock.notify_all()

    def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        """Take requests out of the queue, and return the ids that were still in it."""
        wanted = set(sample_ids)
        with self._lock:
            taken = [r.sample_id for r, _ in self._queue if r.sample_id in wanted]
            gone = set(taken)
            self._queue = deque(item for item in self._queue if item[0].sample_id not in gone)
        return taken

    def held(self) -> list[str]:
        """Return the ids of all requests queued or running here, or with a sample to take."""
        with self._lock:
            queued = (request.sample_id for request, _ in self._queue)
            return [*queued, *self._in_flight, *(s.sample_id for s in self._finished)]

    def take_finished(self, timeout_s: float) -> list[Sample]:
        """Return the samples that ended since the last call; wait for the first one."""
        with self._lock:
            self._lock.wait_for(lambda: self._finished or self._error or self._stopping, timeout_s)
            if not self._finished:
                self._raise_if_dead()
                self._raise_if_stalled()
            samples, self._finished = self._finished, []
            return samples

    def take_texts(self) -> list[tuple[str, int, Text]]:
        """Return what running requests have gained: ids, places in the responses, and tokens.

        They continue what earlier calls have returned, and are at most `TEXTS_S` old.
        """
        with self._lock:
            texts, self._texts = self._texts, []
            return texts

    def between_steps(self, command: Callable[[], T]) -> T:
        """Run a command in the loop's thread, between two engine steps; return its result."""
        future: Future[T] = Future()
        with self._lock:
            self._raise_if_dead()
            self._commands.append((command, future))
            self._lock.notify_all()
        return future.result()

    def between_rollouts(self, command: Callable[[], T], why: str) -> T:
        """Run a command as `between_steps` does; refuse it while any request is unfinished."""

        def guarded() -> T:
            if self._in_flight or self._queue:
                raise EngineError(
                    f"{self.num_running} samples are running and {self.num_queued} queued: {why}"
                )
            return command()

        return self.between_steps(guarded)

    def recheck(self, recheck: Recheck) -> Verdict | None:
        """Generate a sample again, and compare it; return None if other work is waiting.

        A request, a command and `end_recheck` end a recheck before the next engine step.
        """
        with self._lock:
            self._raise_if_dead()
            has_work = self._queue or self._in_flight or self._commands
            is_busy = has_work or self._rechecking
            is_late = recheck.request.sample_id == self._ended_recheck
            if is_busy or is_late:
                return None
            self._rechecking = mine = _Rechecking(recheck)
            self._lock.notify_all()
        return mine.verdict.result()

    def end_recheck(self, sample_id: str) -> None:
        """End a recheck, also one that has not arrived yet."""
        with self._lock:
            self._ended_recheck = sample_id

    @property
    def is_stopping(self) -> bool:
        """Whether the engine is shutting down, or is shut down."""
        return self._stopping

    @property
    def num_commands(self) -> int:
        """Commands that have not begun."""
        return len(self._commands)

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        """Requests that have not started."""
        return len(self._queue)

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineError(f"{self.name} has failed: {self._error!r}") from self._error
        if self._stopping:
            raise EngineError(f"{self.name} is shut down")

    def _raise_if_stalled(self) -> None:
        started_s, now_s = self._turn_started_s, self._clock()
        if started_s is not None and now_s - started_s > self._stall_timeout_s:
            raise EngineError(
                f"{self.name} has been in one step or command for {now_s - started_s:.0f} s"
            )

    # --- the loop's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            report = self._core.start()
        except BaseException as error:
            self._fail(error)
            self._ready.set_exception(error)
            return
        self._slots = report["slots"]
        self._ready.set_result(report)
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("%s: the engine loop ended", self.name)
            self._fail(error)
        self._drop_commands(EngineError(f"{self.name} is shut down"))
        if self._rechecking is not None:
            self._recheck_ended(self._rechecking, None)
        try:
            self._core.stop()
        except Exception:
            logger.exception("%s did not shut down cleanly", self.name)

    def _turn(self) -> bool:
        """Run commands, admit requests, run one engine step; return False to stop the loop."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    self._queue
                    or self._in_flight
                    or self._commands
                    or self._rechecking
                    or self._stopping
                )
            )
            if self._stopping:
                return False
            self._turn_started_s = self._clock()
            num_commands = len(self._commands)
            free = self._slots - len(self._in_flight)
            admitted = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
            # Still under the lock: a withdrawal must never see a request twice or not at all.
            for request, arrived_s in admitted:
                self._in_flight[request.sample_id] = (arrived_s, time.time())
            rechecking = self._rechecking
        if rechecking is not None:
            self._recheck_turn(rechecking, is_in_the_way=bool(admitted or num_commands))
        self._run_commands(num_commands)
        for request, _ in admitted:
            if request.begun and request.begun.policy_version != self.policy_version:
                request = replace(request, begun=None)  # never a sample of two policies
            self._core.admit(request)
        if self._in_flight:
            self._collect(self._core.step())
            self._note_texts()
        self._turn_started_s = None
        return True

    def _run_commands(self, count: int) -> None:
        for _ in range(count):
            with self._lock:
                command, future = self._commands.popleft()
            self._turn_started_s = self._clock()  # each has the time of an engine step
            try:
                future.set_result(command())
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, WeightMismatch):
                    future.set_exception(error)
                    continue
                self._fail(error)  # before a caller learns of it and submits more
                future.set_exception(error)
                raise  # no further engine step
        self._turn_started_s = self._clock()

    def _recheck_turn(self, mine: _Rechecking, is_in_the_way: bool) -> None:
        """Run one engine step of a recheck, or end it."""
        recheck, tokens = mine.recheck, None
        is_wanted = recheck.request.sample_id != self._ended_recheck
        if is_wanted and not is_in_the_way and recheck.policy_version == self.policy_version:
            if not mine.begun:
                mine.begun = True
                self._core.begin_recheck(recheck)
            ends = list(self._core.step())  # the core has no other work
            if not ends:
                return
            tokens = ends[0].token_ids if ends[0].finish_reason in WHOLE else None
        verdict = None
        if mine.begun:
            missed = self._core.end_recheck(recheck)
            if tokens is not None:
                verdict = compare(recheck.token_ids, tokens, missed)
        self._recheck_ended(mine, verdict)

    def _recheck_ended(self, mine: _Rechecking, verdict: Verdict | None) -> None:
        with self._lock:
            self._rechecking = None
        mine.verdict.set_result(verdict)

    def _collect(self, finished: Iterable[Finished]) -> None:
        samples = []
        for end in finished:
            arrived_s, started_s = self._in_flight.pop(end.sample_id)
            if end.finish_reason not in WHOLE:
                logger.error(
                    "%s: sample %s ended by %s", self.name, end.sample_id, end.finish_reason
                )
            samples.append(
                Sample(
                    sample_id=end.sample_id,
                    token_ids=end.token_ids,
                    logprobs=end.logprobs,
                    finish_reason=end.finish_reason,
                    engine=self.name,
                    policy_version=self.policy_version,
                    queued_s=started_s - arrived_s,
                    running_s=end.finished_at_s - started_s,
                    finished_at_s=end.finished_at_s,
                )
            )
        if samples:
            with self._lock:
                self._finished.extend(samples)
                self._texts = [text for text in self._texts if text[0] in self._in_flight]
                self._lock.notify_all()

    def _note_texts(self) -> None:
        """Keep what running requests have gained for the pool."""
        if self._clock() - self._texts_noted_s < TEXTS_S:
            return
        self._texts_noted_s = self._clock()
        version = self.policy_version
        gained = [(name, at, Text(ids, of, version)) for name, at, ids, of in self._core.gained()]
        with self._lock:
            self._texts += gained

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._lock.notify_all()
        left: Exception = EngineError(f"{self.name} has failed: {error!r}")
        self._drop_commands(error if isinstance(error, WeightMismatch) else left)

    def _drop_commands(self, error: Exception) -> None:
        """Fail every queued command: it will never run."""
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for _, future in commands:
            future.set_exception(error)
