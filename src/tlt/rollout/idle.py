"""Work for engines that have nothing left to generate while others do.

An idle engine makes a recheck if one is due (`recheck`). Its device is then free for the listener,
which is harvest. Without a listener, the engine makes one recheck after the other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from tlt.contracts import Recheck, Sample, SampleRequest
from tlt.errors import EngineError
from tlt.rollout.away import Away
from tlt.rollout.client import Engine, EngineClient, LoadListener, place_of
from tlt.rollout.dispatch import Dispatcher
from tlt.rollout.recheck import Rechecks
from tlt.spans import Span

logger = logging.getLogger(__name__)


class IdleTime:
    """The idle time of a pool's engines."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        clients: Mapping[str, EngineClient],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._away = Away(clock)
        self._turns: set[str] = set()
        """Samples under way that are turns: an environment answers them."""
        self._clients = clients
        """The engines of the pool, as they come and go."""
        self._spawn = spawn
        self.listener: LoadListener | None = None
        self.rechecks = Rechecks(share=0.0, max_tokens=0, dtype="float32")
        self._rechecking: dict[str, EngineClient] = {}
        """Samples that are generated again, and the engine of each."""

    def offer(self, names: Iterable[str]) -> None:
        """Let each idle engine of these make a recheck, or else offer its device."""
        for name in names:
            if not self._is_idle(name):
                continue
            if (recheck := self.rechecks.next()) is not None:
                self._spawn(self._recheck(self._clients[name], recheck))
            elif self.listener is not None:
                self.listener.idle(name, self._away.returns_s(name))

    def at_tools(self, engine: str) -> bool:
        """Return whether trajectories of this engine wait for their environment."""
        return self._away.returns_s(engine) < math.inf

    def turns_started(self, requests: Iterable[SampleRequest]) -> None:
        """Note that an environment answers these samples."""
        self._turns |= {request.sample_id for request in requests}

    def finished(self, sample: Sample) -> None:
        """Note a whole sample, before it is delivered."""
        if sample.sample_id in self._turns:
            self._turns.discard(sample.sample_id)
            self._away.left(sample.engine, sample.sample_id)
        self.rechecks.finished(sample)
        self._rollout_may_end()

    def turn_answered(self, turn: Sample, follows: bool) -> None:
        """Note that an environment has answered a turn, and whether another turn follows."""
        self._away.back(turn.sample_id, by_tool=follows)
        if not follows:
            self._rollout_may_end()
            self.offer([turn.engine])

    def take_tool_spans(self) -> dict[str, list[Span]]:
        """Return when trajectories of every place waited for tools since the last call."""
        return {place_of(name): spans for name, spans in self._away.take_spans().items()}

    def _rollout_may_end(self) -> None:
        """End all rechecks if nothing is left to generate."""
        if self._dispatcher.num_unfinished or self._away:
            return
        self.rechecks.rollout_ended()
        for sample_id, client in self._rechecking.items():
            self._spawn(self._end_recheck(client, sample_id))

    def _is_idle(self, name: str) -> bool:
        """Return whether an engine has nothing to generate while others have."""
        dispatcher = self._dispatcher
        is_over = not dispatcher.num_unfinished and not self._away
        if dispatcher.num_queued or is_over or name not in self._clients:
            return False
        return not dispatcher.outstanding(name)

    async def _recheck(self, client: EngineClient, recheck: Recheck) -> None:
        self._rechecking[recheck.request.sample_id] = client
        started_s, verdict = time.monotonic(), None
        try:
            verdict = await client.call(Engine.recheck, recheck)
        except Exception as error:
            logger.debug("%s did not answer a recheck: %r", client.name, error)
        self._rechecking.pop(recheck.request.sample_id, None)
        self.rechecks.ended(recheck, verdict, client.name, time.monotonic() - started_s)
        if self.listener is None:
            if verdict is not None:
                self.offer([client.name])
        elif self._is_idle(client.name):
            self.listener.idle(client.name, self._away.returns_s(client.name))

    async def _end_recheck(self, client: EngineClient, sample_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that is lost generates nothing
            await client.call(Engine.end_recheck, sample_id)
