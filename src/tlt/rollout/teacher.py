"""Hands texts to the engines that should learn them, so slowly that nobody notices.

Each engine gets one message at a time, of bounded size, with a pause after it. What comes meanwhile
waits, and the oldest of too much is dropped: texts save time, and must not cost any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tlt.errors import EngineError
from tlt.rollout.texts import Inbox, Lesson
from tlt.rollout.watched import WatchedEngine

logger = logging.getLogger(__name__)

MESSAGE_TOKENS = 16_384
"""Tokens of one message to an engine, unless one text has more."""
WAITING_TOKENS = 1_000_000
"""Tokens that may wait for one engine."""
PAUSE_S = 0.1
"""Shortest pause after a message to an engine."""
ASK_S = 1.0
"""Shortest time between two questions to an engine for its running responses."""
MESSAGES_PER_S = 500
"""Messages per second to all engines together."""


class Teacher:
    """Sends lessons to engines. `spawn` runs a coroutine beside everything else."""

    def __init__(
        self, num_engines: int, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._pause_s = max(PAUSE_S, num_engines / MESSAGES_PER_S)
        self._spawn = spawn
        self.asks_every_s = max(ASK_S, 2 * self._pause_s)
        """Seconds between two questions to an engine for its running responses."""
        self._waiting: dict[str, Inbox] = {}
        """Lessons of each engine that a task is teaching."""

    def teach(self, engine: WatchedEngine, lessons: Iterable[Lesson]) -> None:
        """Let an engine learn these texts soon."""
        new = list(lessons)
        if not new:
            return
        if engine.name not in self._waiting:
            self._waiting[engine.name] = Inbox(WAITING_TOKENS)
            self._spawn(self._run(engine))
        self._waiting[engine.name].put(new)

    async def _run(self, engine: WatchedEngine) -> None:
        waiting = self._waiting[engine.name]
        try:
            while lessons := waiting.take(MESSAGE_TOKENS):
                await engine.call("learn", lessons)
                await asyncio.sleep(self._pause_s)
        except EngineError as error:  # the engine generates without them
            logger.debug("%s did not learn: %r", engine.name, error)
        finally:
            del self._waiting[engine.name]
