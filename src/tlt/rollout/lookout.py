"""Lets idle engines look ahead: carries out what `ahead` decides, one turn of an engine at a time.

A turn ends when the engine is needed, when harvest should have it, when nothing is left to generate
ahead, or when the rollout ends. The engine ends it by itself when a request comes, and before a
policy update: a lost message costs texts, and never a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tlt.contracts import SampleRequest
from tlt.errors import ConfigError, EngineError
from tlt.rollout.ahead import LookAhead
from tlt.rollout.watched import WatchedEngine

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Longest wait for a text that an engine generates ahead, before the pool asks again."""


class Lookout:
    """The turns of all engines. `spawn` runs a coroutine beside everything else."""

    def __init__(
        self,
        ahead: LookAhead,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        is_idle: Callable[[str], bool],
        turn_ended: Callable[[str], None],
        clock: Callable[[], float],
        command_timeout_s: float,
    ) -> None:
        self._poll_s = min(POLL_S, command_timeout_s / 4)
        self._ahead = ahead
        self._spawn = spawn
        self._is_idle = is_idle
        self._turn_ended = turn_ended
        self._clock = clock
        self._slots: dict[str, int] = {}
        """Engines that can look ahead, and how many requests each runs at once."""
        self._turns: dict[str, tuple[int, WatchedEngine]] = {}
        """Engines that look ahead, and the numbers of their turns."""
        self._count = itertools.count(1)
        self.shares = False
        """Whether harvest should have a part of the idle time."""

    def __contains__(self, name: str) -> bool:
        """Return whether an engine looks ahead."""
        return name in self._turns

    def engine_ready(self, name: str, slots: int) -> None:
        """Add an engine that samples by keys and learns texts."""
        self._slots[name] = slots

    def engine_lost(self, name: str) -> None:
        """Remove an engine."""
        self._slots.pop(name, None)
        self._ahead.needed(name)

    def begin(self, engine: WatchedEngine) -> bool:
        """Let an idle engine look ahead; return False if it should not."""
        if self._seconds(engine.name) <= 0:
            return False
        first = self._ahead.next(self._slots.get(engine.name, 0))
        if first:
            self._turns[engine.name] = next(self._count), engine
            self._spawn(self._run(engine, first))
        return bool(first)

    def rollout_ended(self) -> None:
        """Let no engine go on."""
        self._ahead.rollout_ended()
        for turn, engine in self._turns.values():
            self._spawn(self._end(engine, turn))

    def _seconds(self, name: str) -> float:
        """Return for how long an engine should go on before the pool asks again."""
        if not self._is_idle(name):
            return 0.0
        left_s = self._ahead.seconds_left(name) if self.shares else self._poll_s
        return max(0.0, min(self._poll_s, left_s))

    async def _run(self, engine: WatchedEngine, new: Sequence[SampleRequest]) -> None:
        name = engine.name
        turn, _ = self._turns[name]
        given: list[SampleRequest] = []
        running: dict[str, SampleRequest] = {}
        wait_s = self._seconds(name)
        try:
            while True:
                given += new
                running |= {request.sample_id: request for request in new}
                asked_s = self._clock()
                texts, is_over = await engine.call("look_ahead", turn, list(new), wait_s)
                self._ahead.ended(texts, self._clock() - asked_s)
                if is_over:
                    break
                for text in texts:
                    running.pop(text.name, None)
                wait_s, new = self._seconds(name), ()
                if wait_s > 0:
                    free = self._slots.get(name, 0) - len(running)
                    new = self._ahead.next(free, running.values())
                if wait_s <= 0 or not (new or running):
                    await engine.call("end_look_ahead", turn)
                    wait_s, new = self._poll_s, ()
        except (ConfigError, EngineError) as error:  # texts save time, and must not cost any
            logger.debug("%s did not look ahead: %r", name, error)
            self._spawn(self._end(engine, turn))
        finally:
            del self._turns[name]
            self._ahead.turn_ended(given)
        self._turn_ended(name)

    async def _end(self, engine: WatchedEngine, turn: int) -> None:
        with contextlib.suppress(EngineError):  # an engine that is lost generates nothing
            await engine.call("end_look_ahead", turn)
