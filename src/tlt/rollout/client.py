"""The commands of an engine, and the pool's client that calls them.

`Engine` lists every command that the pool gives to an engine in another process, and how soon the
engine must answer. In `client.call(Engine.update_policy, manifest, version)` mypy checks the
arguments. Every call ends in time, with an answer or with an `EngineError`.

The pool replaces an engine that it no longer trusts: one that did not answer in time, or did not
take its requests. It marks the engine as failed: every call to it, also one under way, raises
`EngineGone`, and the engine's task in the pool starts a successor. That does not depend on what the
engine still answers. `Progress` finds samples that were lost although every call was answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from tlt.config.rollout import PoolConfig
from tlt.contracts import EngineStats, Recheck, Sample, SampleRequest, StepReport, Text
from tlt.errors import EngineError, EngineGone
from tlt.rollout.recheck import Verdict
from tlt.spans import Span

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Deadline = Literal["health", "command", "swap"]

SWAP_S = 60.0
"""Seconds after which an engine that has not taken a drafter is replaced."""


def deadline(kind: Deadline) -> Callable[[F], F]:
    """Say how soon an engine must answer a command.

    `health`: within `pool.health_timeout_s`. `command`: within `pool.command_timeout_s`, because it
    waits for the engine step under way. `swap`: within `SWAP_S`, if that is sooner.
    """

    def mark(command: F) -> F:
        command.__dict__["deadline"] = kind
        return command

    return mark


class Engine(Protocol):
    """Every command of an engine. `tlt.rollout.engine.RolloutEngine` carries them out."""

    @deadline("health")
    def submit(self, requests: Sequence[SampleRequest]) -> None: ...
    @deadline("health")
    def withdraw(self, sample_ids: Sequence[str]) -> list[str]: ...
    @deadline("health")
    def take_finished(self, timeout_s: float) -> list[Sample]: ...
    @deadline("health")
    def take_texts(self) -> list[tuple[str, int, Text]]: ...
    @deadline("command")
    def held(self) -> list[str]: ...
    @deadline("command")
    def recheck(self, recheck: Recheck) -> Verdict | None: ...
    @deadline("command")
    def end_recheck(self, sample_id: str) -> None: ...

    @deadline("command")
    def set_strategy(self, spec: dict[str, Any]) -> None: ...
    @deadline("command")
    def update_policy(self, manifest: dict[str, Any], version: int) -> float: ...
    @deadline("swap")
    def update_drafter(self, manifest: dict[str, Any], version: int) -> float: ...
    @deadline("command")
    def connect_policy(self, init_info: dict[str, Any]) -> None: ...
    @deadline("command")
    def start_policy(self, shapes: list[tuple[str, list[int]]]) -> None: ...
    @deadline("command")
    def receive_policy(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    @deadline("command")
    def finish_policy(self, version: int, seed: int, fingerprints: dict[str, Any]) -> float: ...

    @deadline("command")
    def sleep(self, keep_policy: bool = True) -> None: ...
    @deadline("command")
    def wake_weights(self) -> None: ...
    @deadline("command")
    def wake(self) -> None: ...
    @deadline("command")
    def reset_prefix_cache(self) -> None: ...

    @deadline("command")
    def report(self) -> dict[str, Any]: ...
    @deadline("command")
    def stats(self) -> EngineStats: ...
    @deadline("command")
    def take_trace(self) -> list[StepReport]: ...
    @deadline("command")
    def take_spans(self, max_spans: int) -> list[Span]: ...
    @deadline("command")
    def devices(self) -> tuple[str, list[str]]: ...
    @deadline("command")
    def shutdown(self) -> None: ...


class EngineProcess(Protocol):
    """An engine in its own process (`tlt.rollout.actor.RayEngine`)."""

    async def start(self) -> dict[str, Any]:
        """Start the engine, and return its report."""
        ...

    async def call(
        self, command: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the engine's answer; raise `EngineGone` if its process has ended."""
        ...

    async def stop(self, graceful: bool) -> None:
        """End the process."""
        ...


Spawner = Callable[[str], EngineProcess]


class LoadListener(Protocol):
    """A user of the devices of idle engines."""

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """Note that an engine has started, with its report."""
        ...

    def idle(self, engine: str, for_s: float = math.inf) -> None:
        """Note that an engine has nothing to generate while others still do.

        One of the engine's trajectories comes back from a tool in about `for_s` seconds.
        """
        ...

    async def needed(self, engine: str) -> None:
        """Free the engine's device; the pool sends work to the engine after this returns."""
        ...


def place_of(engine: str) -> str:
    """Return the place of an engine. The successor of a lost engine takes its place."""
    return engine.split(".")[0]


class EngineClient:
    """The pool's client to one engine: every call ends in time."""

    def __init__(self, name: str, process: EngineProcess, limits: PoolConfig) -> None:
        self.name = name
        self.process = process
        self._start_s = limits.start_timeout_s
        self._limits_s: dict[Deadline, float] = {
            "health": limits.health_timeout_s,
            "command": limits.command_timeout_s,
            "swap": min(SWAP_S, limits.command_timeout_s),
        }
        self._failed = asyncio.Event()
        self._why = ""
        self.held_policy = True
        """Whether the engine's tokens are certainly the policy's."""

    def mark_failed(self, why: str, held_policy: bool = True) -> None:
        """Let all calls fail from now on: the pool then replaces the engine."""
        self._why = self._why or why
        self.held_policy &= held_policy
        self._failed.set()

    def refused(self, what: str, error: BaseException) -> None:
        """Let all calls fail because one did. An engine that has failed may have drawn anything."""
        self.mark_failed(f"{what}: {error}", held_policy=isinstance(error, EngineGone))

    async def start(self) -> dict[str, Any]:
        """Start the engine; one that does not start in time would not start again."""
        try:
            async with asyncio.timeout(self._start_s):
                return await self.process.start()
        except TimeoutError:
            raise EngineError(
                f"{self.name} did not start within {self._start_s:.0f} s; are enough cores or GPUs "
                "free in the cluster? Start fewer engines, or raise pool.start_timeout_s"
            ) from None

    async def call(
        self, command: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the engine's answer, or raise an `EngineError` by the command's deadline."""
        limit_s = self._limits_s[command.__dict__["deadline"]]
        return await self._in_time(
            command.__name__, self.process.call(command, *args, **kwargs), limit_s
        )

    async def stop(self, graceful: bool) -> None:
        """End the engine; continue after the time limit, because its place needs a successor."""
        self.mark_failed("it is stopped")  # its last answers would be refusals that blame the call
        try:
            async with asyncio.timeout(self._limits_s["health"]):
                await self.process.stop(graceful)
        except TimeoutError:
            logger.warning("%s did not stop in time, and may still hold its device", self.name)

    async def _in_time(self, what: str, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the answer, or raise when the engine has failed or the time is over."""
        answer = asyncio.ensure_future(call)
        answer.add_done_callback(_consume_exception)
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            both: set[asyncio.Future[Any]] = {answer, failed}
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            # First: the answer of an engine that is being replaced does not count, even if it
            # comes at the same moment. Its samples may come from an old policy.
            if not self._failed.is_set():
                if answer.done():
                    return answer.result()
                self.mark_failed(f"no answer to {what} within {limit_s:g} s")
            raise EngineGone(f"{self.name} is replaced: {self._why}")
        finally:
            answer.cancel()
            failed.cancel()


def _consume_exception(answer: asyncio.Future[Any]) -> None:
    """Retrieve an error that no caller waits for."""
    if not answer.cancelled():
        answer.exception()


class Progress:
    """Finds samples that the pool waits for and that the engine does not have.

    An engine that delivers nothing for `every_s` is asked which samples it holds. A sample that is
    missing twice in a row was lost on the way: a request under way arrives in the meantime, or the
    engine is marked as failed.
    """

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._since_s = clock()
        self._missing: set[str] = set()

    def is_due(self, has_delivered: bool) -> bool:
        """Return whether to ask the engine; call this after every answer of `take_finished`."""
        now_s = self._clock()
        if has_delivered:
            self._since_s, self._missing = now_s, set()
        if now_s - self._since_s < self._every_s:
            return False
        self._since_s = now_s
        return True

    def compare(self, name: str, expected: Collection[str], held: Collection[str]) -> None:
        """Raise if the engine still lacks what the pool waits for."""
        missing = set(expected) - set(held)
        lost, self._missing = missing & self._missing, missing
        if lost:
            raise EngineError(f"{name} lost {len(lost)} samples (e.g. {min(lost)})")
