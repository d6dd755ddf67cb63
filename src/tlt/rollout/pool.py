"""The pool keeps engines alive and samples flowing. It is pure asyncio; Ray stays in `actor`.

One task per place starts an engine, loads the current weights into it, and delivers its samples as
they end. When the engine is lost, the same task starts its successor. The dispatcher decides which
engine generates what.

    async with RolloutPool(config, ray_spawner(engine_config)) as pool:
        async for sample in pool.generate(requests):
            ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from tlt.config.rollout import PoolConfig
from tlt.contracts import WHOLE, EngineStats, Recheck, Sample, SampleRequest
from tlt.errors import ConfigError, EngineError, EngineGone, EngineUnsafe
from tlt.rollout.ahead import LookAhead
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.rollout.distribution import WeightDistribution
from tlt.rollout.handle import EngineHandle, LoadListener, Spawner, place_of
from tlt.rollout.lengths import LengthForecast
from tlt.rollout.lookout import Lookout
from tlt.rollout.recheck import Rechecks
from tlt.rollout.teacher import Teacher
from tlt.rollout.texts import Lesson, Texts
from tlt.rollout.watched import Progress, WatchedEngine
from tlt.spans import Span
from tlt.vllm.environment import ROUNDS_BY_BATCH

if TYPE_CHECKING:
    from tlt.rollout.distribution import NewWeights, Publish

logger = logging.getLogger(__name__)


class RolloutPool:
    """A fixed number of engines that generate samples together."""

    def __init__(
        self, config: PoolConfig, spawn: Spawner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._config = config
        self._spawn = spawn
        self.lengths = LengthForecast()
        """Known lengths of responses; the run's checkpoints keep them."""
        self.texts = Texts(config.shared_text_mib << 20)
        """Responses that engines learn n-grams from; the run's checkpoints keep them."""
        self._teacher = Teacher(config.num_engines, self._spawn_send)
        forecast = self.lengths if config.dispatch == "longest_first" else None
        together = config.dispatch == "siblings"
        self._dispatcher = Dispatcher(config.prefetch, forecast, together=together)
        self._handles: dict[str, WatchedEngine] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Queue[Sample | Exception]] = {}
        self._weights = WeightDistribution(self._handles)
        self._failure: Exception | None = None
        self._started = False
        self._told_rounding = False
        self._delivered: set[str] = set()
        """Engines that have delivered a sample."""
        self._listener: LoadListener | None = None
        self._rechecks = Rechecks(share=0.0, max_tokens=0, dtype="float32")
        self._rechecking: dict[str, WatchedEngine] = {}
        """Samples that are generated again, and the engine of each."""
        self.ahead = LookAhead(self.lengths, clock)
        """Texts of the next RL step that idle engines generate ahead."""
        self._lookout = Lookout(
            self.ahead,
            self._spawn_send,
            self._is_idle,
            self._turn_ended,
            clock,
            config.command_timeout_s,
        )
        self._membership = asyncio.Condition()
        self._spans_taken_s = time.time()
        self._absent: dict[str, list[Span]] = {}
        """Times without an engine since the last `take_spans`, by place."""
        self.num_restarts = 0
        self.num_broken = 0
        """Samples that ended by abort or error, and that the pool generated again."""

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> RolloutPool:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def listen(self, listener: LoadListener) -> None:
        """Tell this listener which engines are idle. Call it before the pool starts."""
        self._listener = listener
        self._lookout.shares = True

    def recheck_with(self, rechecks: Rechecks) -> None:
        """Let idle engines generate some samples again without drafts, and compare them."""
        self._rechecks = rechecks

    async def start(self) -> None:
        """Start all engines, and return when every one of them is ready."""
        self._servers = [asyncio.create_task(self._serve(place)) for place in self.places]
        try:
            await self.wait_ready(self._config.num_engines)
        except BaseException:
            await self.shutdown()
            raise
        self._started = True

    async def wait_ready(self, num_engines: int) -> None:
        """Wait until `num_engines` engines are ready."""
        async with self._membership:
            await self._membership.wait_for(
                lambda: self._failure or len(self._handles) >= num_engines
            )
        if self._failure:
            raise self._failure

    async def shutdown(self) -> None:
        """Stop all engines, and drop unfinished samples."""
        for task in [*self._servers, *self._sends]:
            task.cancel()
        await asyncio.gather(*self._servers, *self._sends, return_exceptions=True)
        handles = list(self._handles.values())
        self._handles.clear()
        await asyncio.gather(*(h.stop(graceful=True) for h in handles), return_exceptions=True)
        self._weights.close()

    # --- samples ------------------------------------------------------------------------------

    async def generate(self, requests: Iterable[SampleRequest]) -> AsyncIterator[Sample]:
        """Generate all requests, and yield each sample exactly once, as it ends."""
        batch = list(requests)
        inbox: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        self._raise_if_failed()
        self._dispatcher.submit(batch)
        self._rechecks.rollout_started(batch)
        self.texts.rollout_started(batch)
        self.ahead.rollout_started(batch)
        for request in batch:
            self._waiting[request.sample_id] = inbox
        self._pump()
        self._tell_idle(self._handles)
        for _ in batch:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def look_ahead_on(self, requests: Iterable[SampleRequest]) -> None:
        """Let idle engines generate these samples of the next RL step ahead, as drafts.

        It counts until the rollout under way ends, or the next one.
        """
        if self._config.look_ahead:
            self.ahead.plan(requests)
            if self._listener is None:  # else idle engines may be leased already
                self._tell_idle(self._handles)

    # --- engines ------------------------------------------------------------------------------

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all engines at once; return the answers of those that did not fail.

        An engine that fails is replaced. If all refuse the call, and none of them is gone, the call
        is wrong.
        """
        handles = list(self._handles.values())
        calls = [handle.call(method, *args) for handle in handles]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        refused = [error for error in errors if not isinstance(error, EngineGone)]
        if refused and len(refused) == len(answers):
            raise refused[0]
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, BaseException):
                # Even if it lives: nobody knows whether it has done what it was told.
                handle.mark_failed(f"it did not answer {method}: {answer!r}")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def call_engine(self, engine: str, method: str) -> None:
        """Call a method of one engine, if it is in the pool."""
        if (handle := self._handles.get(engine)) is not None:
            await self._call_or_replace(handle, method)

    async def _call_or_replace(self, handle: WatchedEngine, method: str, *args: Any) -> None:
        """Call a method of one engine, and replace the engine if the call fails."""
        try:
            await handle.call(method, *args)
        except EngineError as error:
            handle.mark_failed(f"{method} failed: {error}")

    async def stats(self) -> list[EngineStats]:
        """Return the counters of all engines."""
        return await self.call_all("stats")

    @property
    def num_tainted(self) -> int:
        """Engines that the pool replaced because they may not have held the learner's policy."""
        return self._weights.num_tainted

    @property
    def failure(self) -> Exception | None:
        """The error that ended the pool; None while it works."""
        return self._failure

    @property
    def engines(self) -> list[str]:
        """Names of the engines that are ready."""
        return list(self._handles)

    @property
    def places(self) -> list[str]:
        """Names of the places in the pool. The successor of a lost engine takes its place."""
        return [f"engine-{index}" for index in range(self._config.num_engines)]

    def loads(self) -> dict[str, int | None]:
        """Return the unfinished samples of every place; None for a place without an engine."""
        there = {place_of(name): self._dispatcher.outstanding(name) for name in self._handles}
        return {place: there.get(place) for place in self.places}

    async def take_spans(self, max_spans: int) -> dict[str, list[Span]]:
        """Return the spans of every place since the last call, without those of lost engines."""
        handles = dict(self._handles)
        calls = [handle.call("take_spans", max_spans) for handle in handles.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        absent, self._absent = self._absent, {}
        now_s, since_s, self._spans_taken_s = time.time(), self._spans_taken_s, time.time()
        spans: dict[str, list[Span]] = {place: absent.get(place, []) for place in self.places}
        silent = set(self.places)
        for name, answer in zip(handles, answers, strict=True):
            if not isinstance(answer, BaseException):
                spans[place_of(name)] += answer
                silent.discard(place_of(name))
        for place in silent:
            spans[place].append(Span("lost", since_s, now_s))
        return spans

    async def set_strategy(self, spec: dict[str, Any]) -> None:
        """Choose arms by another strategy in all engines."""
        await self.call_all("set_strategy", spec)

    async def update_policy(self, weights: NewWeights, version: int) -> list[float]:
        """Load policy weights into all engines, later ones included; return the seconds of each."""
        self._refuse_in_rollout()
        return await self._weights.update_policy(weights, version)

    def policy_comes(
        self, version: int, publish: Publish
    ) -> AbstractAsyncContextManager[Mapping[str, EngineHandle]]:
        """Yield the engines that a learner sends a policy to; it is theirs at the end.

        An engine that starts later gets it through shared memory: `publish` writes it when needed.
        Engines that took only a part of the policy are replaced.
        """
        self._refuse_in_rollout()
        return self._weights.policy_comes(version, publish)

    def _refuse_in_rollout(self) -> None:
        if self._dispatcher.num_unfinished:
            raise EngineError(
                f"{self._dispatcher.num_unfinished} samples are under way: finish the rollout "
                "before the policy changes"
            )

    async def update_drafter(
        self, weights: NewWeights, version: int, skip: Collection[str] = ()
    ) -> list[float]:
        """Load drafter weights into all engines, at any time; return the seconds of each.

        Sleeping engines are skipped, and get the weights by `refresh_drafter`.
        """
        return await self._weights.update_drafter(weights, version, skip)

    async def refresh_drafter(self, engine: str) -> None:
        """Load the current drafter weights into an engine that `update_drafter` skipped."""
        current, handle = self._weights.drafter(), self._handles.get(engine)
        if current is not None and handle is not None:
            await self._call_or_replace(handle, "update_drafter", *current)

    # --- one engine's life --------------------------------------------------------------------

    async def _serve(self, slot: str) -> None:
        """Keep an engine in one place of the pool."""
        lost_s: deque[float] = deque(maxlen=self._config.max_restarts + 1)
        useless = 0  # engines in a row that delivered no sample, however long they took to fail
        for incarnation in itertools.count():
            name = slot if incarnation == 0 else f"{slot}.{incarnation}"
            handle = WatchedEngine(name, self._spawn(name), self._config)
            try:
                await self._run_engine(name, handle)
            except asyncio.CancelledError:
                if name not in self._handles:
                    await handle.stop(graceful=False)
                raise
            except Exception as error:
                self._handles.pop(name, None)
                await self._lost(name, handle, error)
                if not self._started:
                    await self._fail(error)  # an engine that fails to start once will fail again
                    return
                lost_s.append(self._clock())
                useless = 0 if name in self._delivered else useless + 1
                self._delivered.discard(name)
                within_s = lost_s[-1] - lost_s[0]
                is_often = (
                    len(lost_s) == lost_s.maxlen and within_s <= self._config.restart_window_s
                )
                if is_often or useless > self._config.max_restarts:
                    await self._give_up(slot, within_s, error)
                    return

    async def _run_engine(self, name: str, handle: WatchedEngine) -> None:
        report = await handle.start()
        await self._weights.bring_up_to_date(handle)
        self._dispatcher.engine_ready(name, report["slots"])
        async with self._membership:
            self._handles[name] = handle
            self._membership.notify_all()
        if report.get("learns"):
            self.texts.engine_ready(name)
            self._spawn_send(self._share_running(name, handle))
            if report.get("keyed"):
                self._lookout.engine_ready(name, report["slots"])
        logger.info("%s is ready with %d slots", name, report["slots"])
        if report.get("rounds_by_batch") and not self._told_rounding:
            self._told_rounding = True
            logger.warning(ROUNDS_BY_BATCH)
        if self._started:
            lost = Span("lost", self._spans_taken_s, time.time())
            self._absent.setdefault(place_of(name), []).append(lost)
        if self._listener is not None:
            self._listener.ready(name, report)
        self._pump()
        progress = Progress(self._config.health_timeout_s, self._clock)
        while True:
            if samples := await handle.take_finished():
                await self._deliver(name, samples)
            if progress.is_due(bool(samples)):
                held = await handle.call("held")
                progress.compare(name, self._dispatcher.held_by(name), held)

    async def _lost(self, name: str, handle: EngineHandle, error: Exception) -> None:
        try:
            requeued = self._dispatcher.engine_lost(name)
        except EngineError as poison:
            await self._fail(poison)
            return
        logger.warning("%s is lost (%r); %d samples start again", name, error, len(requeued))
        self.num_restarts += 1
        self.texts.engine_lost(name)
        self._lookout.engine_lost(name)
        self._pump()
        if self._listener is not None:
            self._spawn_send(self._listener.needed(name))  # for its successor
        stop = asyncio.ensure_future(handle.stop(graceful=False))
        try:
            await asyncio.shield(stop)
        except asyncio.CancelledError:  # the pool ends, and no engine outlives it
            await asyncio.gather(stop, return_exceptions=True)
            raise
        except Exception:
            logger.exception("%s could not be stopped", name)

    async def _give_up(self, slot: str, within_s: float, error: Exception) -> None:
        times = self._config.max_restarts + 1
        logger.error("%s was lost %d times within %.0f s: given up", slot, times, within_s)
        if all(task.done() or task is asyncio.current_task() for task in self._servers):
            await self._fail(
                EngineError(f"every engine was lost for good, the last one by {error!r}")
            )

    async def _fail(self, error: Exception) -> None:
        """Hand the error to everybody who waits for samples or engines."""
        self._failure = error
        for inbox in set(self._waiting.values()):
            inbox.put_nowait(error)
        self._waiting.clear()
        async with self._membership:
            self._membership.notify_all()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError("the pool has failed") from self._failure

    # --- carrying out decisions ---------------------------------------------------------------

    async def _deliver(self, name: str, samples: Sequence[Sample]) -> None:
        """Deliver whole samples, and requeue those that the engine broke off."""
        broken = [s.sample_id for s in samples if s.finish_reason not in WHOLE]
        try:
            self.num_broken += len(self._dispatcher.failed(name, broken))
        except EngineError as poison:
            await self._fail(poison)
            return
        by_id = {s.sample_id: s for s in samples if s.finish_reason in WHOLE}
        lengths = {sample_id: len(sample.token_ids) for sample_id, sample in by_id.items()}
        for sample_id in self._dispatcher.finished(name, lengths):
            self._delivered.add(name)
            self._waiting.pop(sample_id).put_nowait(by_id[sample_id])
            self._rechecks.finished(by_id[sample_id])
            self.ahead.finished(by_id[sample_id])
            self._teach_others(self.texts.finished(by_id[sample_id]))
        if not self._dispatcher.num_unfinished:
            self._end_rechecks()
            self._lookout.rollout_ended()
            self.texts.rollout_ended()
        self._pump()
        self._tell_idle([name])

    def _tell_idle(self, names: Iterable[str]) -> None:
        """Let idle engines make a recheck, if one is due, then look ahead, then be leased."""
        for name in names:
            if not self._is_idle(name) or name in self._lookout:
                continue
            self.ahead.idle(name)
            if (recheck := self._rechecks.next()) is not None:
                self._spawn_send(self._recheck(name, self._handles[name], recheck))
            else:
                self._leave_idle(name)

    def _leave_idle(self, name: str) -> None:
        """Let an idle engine look ahead, or tell the listener that its device is free."""
        if not self._lookout.begin(self._handles[name]) and self._listener is not None:
            self._listener.idle(name)

    def _is_idle(self, name: str) -> bool:
        """Return whether an engine has nothing to generate while others have."""
        dispatcher = self._dispatcher
        if dispatcher.num_queued or not dispatcher.num_unfinished or name not in self._handles:
            return False
        return not dispatcher.outstanding(name)

    async def _recheck(self, name: str, handle: WatchedEngine, recheck: Recheck) -> None:
        self._rechecking[recheck.request.sample_id] = handle
        started_s, verdict = time.monotonic(), None
        try:
            verdict = await handle.call("recheck", recheck)
        except Exception as error:
            logger.debug("%s did not answer a recheck: %r", name, error)
        self._rechecking.pop(recheck.request.sample_id, None)
        self._rechecks.ended(recheck, verdict, name, time.monotonic() - started_s)
        if self._listener is None:
            if verdict is not None:
                self._tell_idle([name])
        elif self._is_idle(name):
            self._leave_idle(name)

    def _turn_ended(self, name: str) -> None:
        """Tell the listener that an engine has looked ahead, and is still idle."""
        if self._listener is not None and self._is_idle(name):
            self._listener.idle(name)

    def _end_rechecks(self) -> None:
        """Let no engine go on with a recheck when the rollout is over."""
        self._rechecks.rollout_ended()
        for sample_id, handle in self._rechecking.items():
            self._spawn_send(self._end_recheck(handle, sample_id))

    async def _end_recheck(self, handle: WatchedEngine, sample_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that is lost generates nothing
            await handle.call("end_recheck", sample_id)

    def _pump(self) -> None:
        for action in self._dispatcher.actions():
            handle = self._handles.get(action.engine)
            if handle is None:
                continue  # just lost: its task requeues the samples
            if isinstance(action, Assign):
                self._spawn_send(self._send(action.engine, handle, action.requests))
            else:
                self._spawn_send(self._recall(action.engine, handle, action.sample_ids))

    def _teach_others(self, found: tuple[Lesson, set[str]] | None) -> None:
        lesson, others = found or (None, set())
        for handle in map(self._handles.get, others):
            if lesson is not None and handle is not None:
                self._teacher.teach(handle, [lesson])

    async def _share_running(self, name: str, handle: WatchedEngine) -> None:
        """Hand running responses of an engine to the others that have siblings of them."""
        try:
            while self._handles.get(name) is handle:
                await asyncio.sleep(self._teacher.asks_every_s)
                is_busy = self._handles.get(name) is handle and self._dispatcher.outstanding(name)
                if is_busy and (wanted := self.texts.wanted(name)):
                    for part in await handle.call("running_texts", wanted):
                        self._teach_others(self.texts.grown(name, *part))
        except EngineError as error:  # the engine's task notices if it is lost
            logger.debug("%s did not share its running responses: %r", name, error)

    def _spawn_send(self, send: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(send)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(
        self, name: str, handle: WatchedEngine, requests: Sequence[SampleRequest]
    ) -> None:
        self.ahead.needed(name)
        try:
            if self._listener is not None:
                await self._listener.needed(name)
            await handle.submit(requests)
        except Exception as error:
            refused = (ConfigError, EngineUnsafe)
            if isinstance(error, refused) or isinstance(error.__cause__, refused):
                await self._fail(error)  # no engine would take it
            else:
                # Nobody knows which requests it holds: its successor's samples count.
                handle.mark_failed(f"it did not take {len(requests)} requests: {error}")
            return
        lessons = [*self.ahead.lessons(requests), *self.texts.assigned(name, requests)]
        self._teacher.teach(handle, lessons)
        self._dispatcher.arrived(name)
        self._pump()

    async def _recall(self, name: str, handle: WatchedEngine, sample_ids: Sequence[str]) -> None:
        try:
            taken = await handle.withdraw(sample_ids)
        except Exception as error:
            # It may have given the requests back, and nobody would generate them.
            handle.mark_failed(f"it did not answer a recall: {error}")
            return
        self._dispatcher.recalled(name, taken)
        self._pump()
