"""The pool: keeps engines alive and samples flowing. asyncio only; Ray stays in `actor`.

One task per engine starts it, brings it to the current weights, and carries samples out as they
end; when the engine is lost, the same task starts its successor. Decisions are the dispatcher's.

    async with RolloutPool(config, ray_spawner(engine_config)) as pool:
        async for sample in pool.generate(requests):
            ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Protocol

from tlt.config.rollout import PoolConfig
from tlt.contracts import WHOLE, EngineStats, Sample, SampleRequest
from tlt.errors import ConfigError, EngineError, EngineGone, EngineTainted, EngineUnsafe
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.spans import Span

if TYPE_CHECKING:
    import torch

    from tlt.node.weights import SharedWeights

    NewWeights = SharedWeights | Iterable[tuple[str, torch.Tensor]]
    """Already in this node's shared memory, and then the pool's to remove; or still to go there."""

logger = logging.getLogger(__name__)


class EngineHandle(Protocol):
    """An engine somewhere else. Any exception from it means that it is lost."""

    async def start(self) -> dict[str, Any]: ...
    async def submit(self, requests: Sequence[SampleRequest]) -> None: ...
    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]: ...
    async def take_finished(self) -> list[Sample]:
        """Samples as they end; an empty list now and then shows that the engine is alive."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Any other method of `RolloutEngine`."""
        ...

    async def stop(self, graceful: bool) -> None: ...


class LoadListener(Protocol):
    """Somebody who uses the devices of engines that have nothing to do."""

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """An engine has started, and says this of itself."""
        ...

    def idle(self, engine: str) -> None:
        """It has nothing to generate, while others still have."""
        ...

    async def needed(self, engine: str) -> None:
        """It gets work again as soon as this returns."""
        ...


Spawner = Callable[[str], EngineHandle]


class RolloutPool:
    """A fixed number of engines that generate samples together."""

    def __init__(self, config: PoolConfig, spawn: Spawner) -> None:
        self._config = config
        self._spawn = spawn
        self._dispatcher = Dispatcher(config.prefetch)
        self._handles: dict[str, EngineHandle] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Queue[Sample | Exception]] = {}
        self._weights: dict[str, tuple[SharedWeights, int]] = {}
        self._failure: Exception | None = None
        self._started = False
        self._listener: LoadListener | None = None
        self._membership = asyncio.Condition()
        self._spans_taken_s = time.time()
        self._absent: dict[str, list[Span]] = {}
        """When places in the pool were without an engine since the spans were last taken."""
        self.num_restarts = 0
        self.num_tainted = 0
        """Engines that were replaced because they may not have held the learner's policy."""
        self.num_broken = 0
        """Samples that ended by abort or error and were generated again."""

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> RolloutPool:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def listen(self, listener: LoadListener) -> None:
        """Tell somebody which engines have nothing to do. Before the pool starts."""
        self._listener = listener

    async def start(self) -> None:
        """Start all engines; returns when every one of them is ready, or raises."""
        self._servers = [asyncio.create_task(self._serve(place)) for place in self.places]
        try:
            await self.wait_ready(self._config.num_engines)
        except BaseException:
            await self.shutdown()
            raise
        self._started = True

    async def wait_ready(self, num_engines: int) -> None:
        """Wait until so many engines are in the pool."""
        async with self._membership:
            await self._membership.wait_for(
                lambda: self._failure or len(self._handles) >= num_engines
            )
        if self._failure:
            raise self._failure

    async def shutdown(self) -> None:
        """Stop all engines; samples under way are dropped."""
        for task in [*self._servers, *self._sends]:
            task.cancel()
        await asyncio.gather(*self._servers, *self._sends, return_exceptions=True)
        handles, self._handles = list(self._handles.values()), {}
        await asyncio.gather(*(h.stop(graceful=True) for h in handles), return_exceptions=True)
        for weights, _ in self._weights.values():
            weights.close()
        self._weights.clear()

    # --- samples ------------------------------------------------------------------------------

    async def generate(self, requests: Iterable[SampleRequest]) -> AsyncIterator[Sample]:
        """Generate all requests; samples come as they end, each exactly once."""
        batch = list(requests)
        inbox: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        self._raise_if_failed()
        self._dispatcher.submit(batch)
        for request in batch:
            self._waiting[request.sample_id] = inbox
        self._pump()
        self._tell_idle(self._handles)
        for _ in batch:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            yield item

    # --- engines ------------------------------------------------------------------------------

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine at once. One that dies meanwhile has nothing to say."""
        calls = [handle.call(method, *args) for handle in self._handles.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineGone):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def call_engine(self, engine: str, method: str) -> None:
        """Call a method of one engine, if it is there."""
        if (handle := self._handles.get(engine)) is not None:
            await self._call_or_stop(handle, method)

    async def _call_or_stop(self, handle: EngineHandle, method: str, *args: Any) -> None:
        """Call a method of one engine; an engine that fails in it is replaced."""
        try:
            await handle.call(method, *args)
        except EngineGone:
            pass
        except EngineError as error:
            logger.warning("an engine failed in %s (%r) and is replaced", method, error)
            await handle.stop(graceful=False)

    async def stats(self) -> list[EngineStats]:
        return await self.call_all("stats")

    @property
    def places(self) -> list[str]:
        """Of engines, which their successors take over."""
        return [f"engine-{index}" for index in range(self._config.num_engines)]

    def loads(self) -> dict[str, int | None]:
        """Samples that every place has to generate; None while it is without an engine."""
        there = {place_of(name): self._dispatcher.outstanding(name) for name in self._handles}
        return {place: there.get(place) for place in self.places}

    async def take_spans(self, max_spans: int) -> dict[str, list[Span]]:
        """What every place did since the last call. What a lost engine did is lost with it."""
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
        await self.call_all("set_strategy", spec)

    async def update_policy(self, weights: NewWeights, version: int) -> list[float]:
        """New policy weights for all engines, also for those that start later; seconds each."""
        if self._dispatcher.num_unfinished:
            raise EngineError(
                f"{self._dispatcher.num_unfinished} samples are under way: finish the rollout "
                "before the policy changes"
            )
        return await self._update("update_policy", weights, version)

    async def update_drafter(
        self, weights: NewWeights, version: int, skip: Collection[str] = ()
    ) -> list[float]:
        """New drafter weights for all engines, at any time; seconds each.

        Those that are skipped, because they sleep, get them by `refresh_drafter`.
        """
        return await self._update("update_drafter", weights, version, skip)

    async def refresh_drafter(self, engine: str) -> None:
        """The current drafter for an engine that was skipped."""
        current, handle = self._weights.get("update_drafter"), self._handles.get(engine)
        if current is not None and handle is not None:
            await self._call_or_stop(handle, "update_drafter", current[0].manifest(), current[1])

    async def _update(
        self, method: str, new: NewWeights, version: int, skip: Collection[str] = ()
    ) -> list[float]:
        from tlt.node.weights import SharedWeights

        old = self._weights.get(method)
        weights = (
            new if isinstance(new, SharedWeights) else await asyncio.to_thread(SharedWeights, new)
        )
        # From here on a starting engine loads these; the running ones follow.
        self._weights[method] = (weights, version)
        try:
            seconds = await self._load(method, weights.manifest(), version, skip)
        except BaseException:
            del self._weights[method]
            if old is not None:
                self._weights[method] = old
            weights.close()
            raise
        if old is not None:
            old[0].close()
        return seconds

    async def _load(
        self, method: str, manifest: dict[str, Any], version: int, skip: Collection[str]
    ) -> list[float]:
        """Weights into all engines. One that fails where others succeed is replaced."""
        handles = {name: h for name, h in self._handles.items() if name not in skip}
        calls = [handle.call(method, manifest, version) for handle in handles.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [a for a in answers if isinstance(a, BaseException)]
        # Engines that end by themselves are replaced: nothing is said against the weights.
        refused = [a for a in errors if not isinstance(a, EngineGone | EngineTainted)]
        tainted = [a for a in errors if isinstance(a, EngineTainted)]
        self.num_tainted += len(tainted)
        if method == "update_drafter" and tainted and len(tainted) == len(answers):
            raise tainted[0]  # of a drafter: the run goes on with the one before
        if refused and len(errors) == len(answers):
            raise refused[0]  # the weights are wrong, not the engines
        for (name, handle), answer in zip(handles.items(), answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EngineGone):
                logger.warning("%s did not take new weights (%r) and is replaced", name, answer)
                await handle.stop(graceful=False)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # --- one engine's life --------------------------------------------------------------------

    async def _serve(self, slot: str) -> None:
        """Keep one place in the pool filled."""
        for incarnation in range(self._config.max_restarts + 1):
            name = slot if incarnation == 0 else f"{slot}.{incarnation}"
            handle = self._spawn(name)
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
                    await self._fail(error)  # what does not start once will not start again
                    return
        await self._give_up(slot)

    async def _run_engine(self, name: str, handle: EngineHandle) -> None:
        report = await self._start_engine(name, handle)
        await self._bring_up_to_date(handle)
        self._dispatcher.engine_ready(name, report["slots"])
        async with self._membership:
            self._handles[name] = handle
            self._membership.notify_all()
        logger.info("%s is ready with %d slots", name, report["slots"])
        if self._started:
            lost = Span("lost", self._spans_taken_s, time.time())
            self._absent.setdefault(place_of(name), []).append(lost)
        if self._listener is not None:
            self._listener.ready(name, report)
        self._pump()
        while True:
            async with asyncio.timeout(self._config.health_timeout_s):
                samples = await handle.take_finished()
            if samples:
                await self._deliver(name, samples)

    async def _bring_up_to_date(self, handle: EngineHandle) -> None:
        """Load the current weights, also those that come while it loads."""
        loaded: dict[str, tuple[SharedWeights, int]] = {}
        while True:
            newer = [(m, w) for m, w in self._weights.items() if loaded.get(m) is not w]
            if not newer:
                return
            for method, current in newer:
                try:
                    await handle.call(method, current[0].manifest(), current[1])
                except EngineError:
                    if self._weights.get(method) is current:
                        raise  # not just replaced and removed meanwhile
                loaded[method] = current

    async def _start_engine(self, name: str, handle: EngineHandle) -> dict[str, Any]:
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await handle.start()
        except TimeoutError:
            raise EngineError(
                f"{name} did not start within {limit_s:.0f} s; are enough cores or GPUs free in "
                "the cluster? Start fewer engines, or raise pool.start_timeout_s"
            ) from None

    async def _lost(self, name: str, handle: EngineHandle, error: Exception) -> None:
        try:
            requeued = self._dispatcher.engine_lost(name)
        except EngineError as poison:
            await self._fail(poison)
            return
        logger.warning("%s is lost (%r); %d samples start again", name, error, len(requeued))
        self.num_restarts += 1
        self._pump()
        if self._listener is not None:
            self._spawn_send(self._listener.needed(name))  # its successor takes the place
        try:
            await handle.stop(graceful=False)
        except Exception:
            logger.exception("%s could not be stopped", name)

    async def _give_up(self, slot: str) -> None:
        logger.error("%s was lost %d times: given up", slot, self._config.max_restarts + 1)
        if all(task.done() or task is asyncio.current_task() for task in self._servers):
            await self._fail(EngineError("every engine was lost for good; see the log for why"))

    async def _fail(self, error: Exception) -> None:
        """Nothing more will come: tell everybody who waits."""
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
        """Hand out whole samples; those that ended otherwise start again."""
        broken = [s.sample_id for s in samples if s.finish_reason not in WHOLE]
        try:
            self.num_broken += len(self._dispatcher.failed(name, broken))
        except EngineError as poison:
            await self._fail(poison)
            return
        by_id = {s.sample_id: s for s in samples if s.finish_reason in WHOLE}
        for sample_id in self._dispatcher.finished(name, by_id):
            self._waiting.pop(sample_id).put_nowait(by_id[sample_id])
        self._pump()
        self._tell_idle([name])

    def _tell_idle(self, names: Iterable[str]) -> None:
        dispatcher = self._dispatcher
        if self._listener is None or dispatcher.num_queued or not dispatcher.num_unfinished:
            return
        for name in names:
            if not dispatcher.outstanding(name):
                self._listener.idle(name)

    def _pump(self) -> None:
        for action in self._dispatcher.actions():
            handle = self._handles.get(action.engine)
            if handle is None:
                continue  # just lost: its server takes the samples back
            if isinstance(action, Assign):
                self._spawn_send(self._send(action.engine, handle, action.requests))
            else:
                self._spawn_send(self._recall(action.engine, handle, action.sample_ids))

    def _spawn_send(self, send: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(send)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(
        self, name: str, handle: EngineHandle, requests: Sequence[SampleRequest]
    ) -> None:
        try:
            if self._listener is not None:
                await self._listener.needed(name)
            await handle.submit(requests)
        except (ValueError, EngineError) as error:
            refused = (ConfigError, EngineUnsafe)
            if isinstance(error, refused) or isinstance(error.__cause__, refused):
                await self._fail(error)  # no engine would take it
        except Exception as error:
            logger.debug("%s did not take %d requests: %r", name, len(requests), error)
            # Its server notices the loss and requeues them.

    async def _recall(self, name: str, handle: EngineHandle, sample_ids: Sequence[str]) -> None:
        try:
            taken = await handle.withdraw(sample_ids)
        except Exception as error:
            logger.debug("%s did not answer a recall: %r", name, error)
            return
        self._dispatcher.recalled(name, taken)
        self._pump()


def place_of(engine: str) -> str:
    """The place of an engine, which its successors take over."""
    return engine.split(".")[0]
