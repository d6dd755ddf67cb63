"""The pool keeps engines alive and hands out samples. It is pure asyncio; Ray stays in `actor`.

One task per place starts an engine, loads the current weights into it, and delivers its samples as
they end. When the engine is lost, the same task starts its successor. The dispatcher decides which
engine generates what.

    async with RolloutPool(config, ray_spawner(engine_config)) as pool:
        async for sample in pool.generate(requests):
            ...
"""

from __future__ import annotations

import asyncio
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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tlt.config.rollout import PoolConfig
from tlt.contracts import WHOLE, EngineStats, Sample, SampleRequest
from tlt.errors import ConfigError, EngineError, EngineGone, EngineUnsafe
from tlt.rollout.client import (
    Engine,
    EngineClient,
    EngineProcess,
    LoadListener,
    Progress,
    Spawner,
    place_of,
)
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.rollout.idle import IdleTime
from tlt.rollout.weights import WeightDistribution
from tlt.spans import Span
from tlt.vllm.environment import ROUNDS_BY_BATCH

if TYPE_CHECKING:
    from tlt.rollout.weights import NewWeights, Publish

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 1.0
"""Seconds after which an engine shows that it is alive, and how far its running samples are."""


class RolloutPool:
    """A fixed number of engines that generate samples together."""

    def __init__(
        self, config: PoolConfig, spawn: Spawner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._config = config
        self._spawn = spawn
        self._dispatcher = Dispatcher(config.prefetch)
        self._clients: dict[str, EngineClient] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Queue[Sample | Exception]] = {}
        self._weights = WeightDistribution(self._clients)
        self._failure: Exception | None = None
        self._started = False
        self._told_rounding = False
        self._useful: set[str] = set()
        """Engines that have drawn anything."""
        self.idle = IdleTime(self._dispatcher, self._clients, self._spawn_send, clock)
        self._membership = asyncio.Condition()
        self._spans_taken_s = time.time()
        self._absent: dict[str, list[Span]] = {}
        """Times without an engine since the last `take_spans`, by place."""
        self.num_restarts = 0
        self.num_kept_tokens = 0
        """Tokens of lost engines that other engines continue, and need not draw again."""
        self._unsent: set[str] = set()
        """Samples whose engine must still wake up and take them."""
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
        self.idle.listener = listener

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
                lambda: self._failure or len(self._clients) >= num_engines
            )
        if self._failure:
            raise self._failure

    async def shutdown(self) -> None:
        """Stop all engines, and drop unfinished samples."""
        for task in [*self._servers, *self._sends]:
            task.cancel()
        await asyncio.gather(*self._servers, *self._sends, return_exceptions=True)
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(c.stop(graceful=True) for c in clients), return_exceptions=True)
        self._weights.close()

    # --- samples ------------------------------------------------------------------------------

    async def generate(
        self, requests: Iterable[SampleRequest], are_turns: bool = False
    ) -> AsyncIterator[Sample]:
        """Generate all requests, and yield each sample exactly once, as it ends.

        After each one that `are_turns`, call `idle.turn_answered`.
        """
        batch = list(requests)
        inbox: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        if self._failure is not None:
            raise EngineError("the pool has failed") from self._failure
        self._dispatcher.submit(batch)
        self.idle.rechecks.rollout_started(batch)
        for request in batch:
            self._waiting[request.sample_id] = inbox
        if are_turns:
            self.idle.turns_started(batch)
        self._pump()
        self.idle.offer(self._clients)
        for _ in batch:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            yield item

    # --- engines ------------------------------------------------------------------------------

    async def call_all(
        self, command: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Send all engines a command; return the answers of the engines that did not fail.

        An engine that fails is replaced. If all refuse the command, and no engine is gone, the
        command is wrong.
        """
        clients = list(self._clients.values())
        calls = [client.call(command, *args, **kwargs) for client in clients]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        refused = [error for error in errors if not isinstance(error, EngineGone)]
        if refused and len(refused) == len(answers):
            raise refused[0]
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, BaseException):
                # Even if it lives: it is unknown whether it has carried the command out.
                client.refused(f"it did not answer {command.__name__}", answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def stats(self) -> list[EngineStats]:
        """Return the counters of all engines."""
        return await self.call_all(Engine.stats)

    async def set_strategy(self, spec: dict[str, Any]) -> None:
        """Choose arms by another strategy in all engines."""
        await self.call_all(Engine.set_strategy, spec)

    async def sleep_engine(self, engine: str) -> None:
        """Let one engine give its device's memory away, if it is in the pool."""
        await self._give(engine, self._weights.sleep)

    async def wake_engine(self, engine: str) -> None:
        """Let one engine take its device's memory back, if it is in the pool."""
        await self._give(engine, self._weights.wake)

    async def _give(
        self, engine: str, command: Callable[[EngineClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Give one engine a command, if it is in the pool, and replace it if the command fails."""
        if (client := self._clients.get(engine)) is not None:
            try:
                await command(client)
            except EngineError as error:
                client.refused(f"{command.__name__} failed", error)

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
        return list(self._clients)

    @property
    def places(self) -> list[str]:
        """Names of the places in the pool. The successor of a lost engine takes its place."""
        return [f"engine-{index}" for index in range(self._config.num_engines)]

    def loads(self) -> dict[str, int | None]:
        """Return the unfinished samples of every place; None for a place without an engine."""
        there = {place_of(name): self._dispatcher.outstanding(name) for name in self._clients}
        return {place: there.get(place) for place in self.places}

    async def take_spans(self, max_spans: int) -> dict[str, list[Span]]:
        """Return the spans of every place since the last call, without those of lost engines."""
        clients = dict(self._clients)
        calls = [client.call(Engine.take_spans, max_spans) for client in clients.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        absent, self._absent = self._absent, {}
        now_s, since_s, self._spans_taken_s = time.time(), self._spans_taken_s, time.time()
        spans: dict[str, list[Span]] = {place: absent.get(place, []) for place in self.places}
        silent = set(self.places)
        for name, answer in zip(clients, answers, strict=True):
            if not isinstance(answer, BaseException):
                spans[place_of(name)] += answer
                silent.discard(place_of(name))
        for place in silent:
            spans[place].append(Span("lost", since_s, now_s))
        return spans

    # --- weights ------------------------------------------------------------------------------

    async def update_policy(self, weights: NewWeights, version: int) -> list[float]:
        """Load policy weights into all engines, later ones included; return the seconds of each."""
        self._refuse_in_rollout()
        return await self._weights.update_policy(weights, version)

    def policy_comes(
        self, version: int, publish: Publish
    ) -> AbstractAsyncContextManager[Mapping[str, EngineProcess]]:
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
        """Load drafter weights into all engines but `skip`, at any time; return their seconds."""
        return await self._weights.update_drafter(weights, version, skip)

    async def refresh_drafter(self, engine: str) -> None:
        """Load the current drafter weights into an engine that `update_drafter` skipped."""
        await self._give(engine, self._weights.refresh_drafter)

    # --- one engine's life --------------------------------------------------------------------

    async def _serve(self, slot: str) -> None:
        """Keep an engine in one place of the pool."""
        lost_s: deque[float] = deque(maxlen=self._config.max_restarts + 1)
        useless = 0  # engines in a row that drew no token, even if they failed late
        for incarnation in itertools.count():
            name = slot if incarnation == 0 else f"{slot}.{incarnation}"
            client = EngineClient(name, self._spawn(name), self._config)
            try:
                await self._run_engine(name, client)
            except asyncio.CancelledError:
                if name not in self._clients:
                    await client.stop(graceful=False)
                raise
            except Exception as error:
                self._clients.pop(name, None)
                await self._lost(name, client, error)
                if not self._started:
                    await self._fail(error)  # an engine that fails to start once will fail again
                    return
                lost_s.append(self._clock())
                useless = 0 if name in self._useful else useless + 1
                self._useful.discard(name)
                within_s = lost_s[-1] - lost_s[0]
                is_often = (
                    len(lost_s) == lost_s.maxlen and within_s <= self._config.restart_window_s
                )
                if is_often or useless > self._config.max_restarts:
                    await self._give_up(slot, within_s, error)
                    return

    async def _run_engine(self, name: str, client: EngineClient) -> None:
        report = await client.start()
        await self._weights.bring_up_to_date(client, self._config.start_timeout_s)
        self._dispatcher.engine_ready(name, report["slots"])
        async with self._membership:
            self._clients[name] = client
            self._membership.notify_all()
        logger.info("%s is ready with %d slots", name, report["slots"])
        if report.get("rounds_by_batch") and not self._told_rounding:
            self._told_rounding = True
            logger.warning(ROUNDS_BY_BATCH)
        if self._started:
            lost = Span("lost", self._spans_taken_s, time.time())
            self._absent.setdefault(place_of(name), []).append(lost)
        if (listener := self.idle.listener) is not None:
            listener.ready(name, report)
        self._pump()
        progress, texts_due_s = Progress(self._config.health_timeout_s, self._clock), 0.0
        while True:
            if samples := await client.call(Engine.take_finished, POLL_S):
                await self._deliver(name, samples)
            if self._dispatcher.outstanding(name) and self._clock() >= texts_due_s:
                if texts := await client.call(Engine.take_texts):
                    self._useful.add(name)
                self._dispatcher.gained(name, texts)
                texts_due_s = self._clock() + POLL_S
            if progress.is_due(bool(samples)):
                held = await client.call(Engine.held)
                progress.compare(name, self._dispatcher.held_by(name) - self._unsent, held)

    async def _lost(self, name: str, client: EngineClient, error: Exception) -> None:
        # Keep no text of an engine that failed by itself, or whose policy is in doubt.
        keep_texts = isinstance(error, EngineGone) and client.held_policy
        try:
            requeued = self._dispatcher.engine_lost(name, keep_texts)
        except EngineError as poison:
            return await self._fail(poison)
        self.num_kept_tokens += (kept := sum(requeued.values()))
        lost = f"{name} is lost ({error!r}); {len(requeued)} samples go to other engines"
        logger.warning("%s, which continue them after %d tokens", lost, kept)
        self.num_restarts += 1
        self._pump()
        if (listener := self.idle.listener) is not None:
            self._spawn_send(listener.needed(name))  # for its successor
        stop = asyncio.ensure_future(client.stop(graceful=False))
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
        """Hand the error to everything that waits for samples or engines."""
        self._failure = error
        for inbox in set(self._waiting.values()):
            inbox.put_nowait(error)
        self._waiting.clear()
        async with self._membership:
            self._membership.notify_all()

    # --- carrying out decisions ---------------------------------------------------------------

    async def _deliver(self, name: str, samples: Sequence[Sample]) -> None:
        """Deliver whole samples, and requeue samples that the engine broke off."""
        broken = [s.sample_id for s in samples if s.finish_reason not in WHOLE]
        try:
            self.num_broken += len(self._dispatcher.failed(name, broken))
        except EngineError as poison:
            return await self._fail(poison)
        by_id = {s.sample_id: s for s in samples if s.finish_reason in WHOLE}
        for sample_id in self._dispatcher.finished(name, by_id):
            self._useful.add(name)
            self._waiting.pop(sample_id).put_nowait(by_id[sample_id])
            self.idle.finished(by_id[sample_id])
        self._pump()
        self.idle.offer([name])

    def _pump(self) -> None:
        for action in self._dispatcher.actions():
            client = self._clients.get(action.engine)
            if client is None:
                continue  # just lost: its task requeues the samples
            if isinstance(action, Assign):
                self._spawn_send(self._send(client, action.requests))
            else:
                self._spawn_send(self._recall(client, action.sample_ids))

    def _spawn_send(self, send: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(send)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, client: EngineClient, requests: Sequence[SampleRequest]) -> None:
        self._unsent |= (ids := {request.sample_id for request in requests})
        try:
            if (listener := self.idle.listener) is not None:
                await listener.needed(client.name)
            await client.call(Engine.submit, requests)
        except Exception as error:
            refused = (ConfigError, EngineUnsafe)
            if isinstance(error, refused) or isinstance(error.__cause__, refused):
                await self._fail(error)  # no engine would take it
            else:
                # It is unknown which requests it holds: its successor's samples count.
                client.refused(f"it did not take {len(requests)} requests", error)
            return
        finally:
            self._unsent -= ids
        self._dispatcher.arrived(client.name)
        self._pump()

    async def _recall(self, client: EngineClient, sample_ids: Sequence[str]) -> None:
        try:
            taken = await client.call(Engine.withdraw, sample_ids)
        except Exception as error:
            # It may have given the requests back, and no other engine would generate them.
            client.refused("it did not answer a recall", error)
            return
        self._dispatcher.recalled(client.name, taken)
        self._pump()
