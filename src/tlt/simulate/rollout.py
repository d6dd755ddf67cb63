"""A rollout in simulated time: the production dispatcher over modelled engines.

All requests of an engine grow at the same pace, which depends on their number and their context.
Between two events of an engine its requests grow evenly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.rollout.dispatch import Assign, Dispatcher


@dataclass(slots=True)
class _Engine:
    running: list[tuple[float, float, int]] = field(default_factory=list)
    """Heap of the position at which a request ends, the one at which it began, and its number."""
    position: float = 0.0
    """Tokens of a request that would run since the rollout began."""
    at_s: float = 0.0
    next_s: float = 0.0
    """When the next request ends."""
    began: float = 0.0
    """Sum of the positions at which the running requests began."""
    stamp: int = 0
    """Number of changes; events with another number are stale."""

    def advance(self, now_s: float) -> None:
        if self.running and self.next_s > self.at_s:
            share = (now_s - self.at_s) / (self.next_s - self.at_s)
            self.position += share * (self.running[0][0] - self.position)
        self.at_s = now_s


class Rollout:
    """The requests of one RL step, dispatched to engines; `play` generates them."""

    def __init__(self, lengths: Sequence[float], num_engines: int, slots: int) -> None:
        self._lengths = lengths
        self._engines = [_Engine() for _ in range(num_engines)]
        self._dispatcher = Dispatcher(prefetch=0)
        for number in range(num_engines):
            self._dispatcher.engine_ready(str(number), slots)
        spec = SamplingSpec(max_tokens=1)  # the dispatcher knows no lengths
        self._dispatcher.submit(SampleRequest(str(n), (), spec) for n in range(len(lengths)))
        self._events: list[tuple[float, int, int]] = []
        self._assign(0.0)
        self.most = max(len(engine.running) for engine in self._engines)
        """Largest number of requests that run on one engine."""
        firsts = (engine.running for engine in self._engines if engine.running)
        self.longest = [max(end for end, _, _ in running) for running in firsts]
        """Longest response of those that start first, by engine."""

    def play(self, row_s: Any, context_s: Any, prompt_tokens: float) -> tuple[Any, Any]:
        """Return the engine of every request, and when it ends.

        An engine step of n requests takes `row_s[n]` seconds, and `context_s[n]` for every token of
        their contexts.
        """
        rows, contexts = np.asarray(row_s).tolist(), np.asarray(context_s).tolist()
        owner: Any = np.zeros(len(self._lengths), dtype=int)
        end_s: Any = np.zeros(len(self._lengths))

        def schedule(number: int) -> None:
            engine = self._engines[number]
            count = len(engine.running)
            if count:
                tokens = engine.running[0][0] - engine.position
                context = count * (prompt_tokens + engine.position + tokens / 2) - engine.began
                pace_s = rows[count] + contexts[count] * context
                engine.next_s = engine.at_s + tokens * pace_s
                heapq.heappush(self._events, (engine.next_s, number, engine.stamp))

        for number in range(len(self._engines)):
            schedule(number)
        while self._events:
            now_s, number, stamp = heapq.heappop(self._events)
            engine = self._engines[number]
            if engine.stamp != stamp:
                continue
            engine.advance(now_s)
            _, began, request = heapq.heappop(engine.running)
            engine.began -= began
            owner[request], end_s[request] = number, now_s
            engine.stamp += 1
            self._dispatcher.finished(str(number), [str(request)])
            for changed in {number, *self._assign(now_s)}:
                schedule(changed)
        return owner, end_s

    def _assign(self, now_s: float) -> list[int]:
        """Start what the dispatcher assigns; return the engines that got something."""
        changed = []
        for action in self._dispatcher.actions():
            assert isinstance(action, Assign), "nothing waits behind slots without prefetching"
            number = int(action.engine)
            engine = self._engines[number]
            engine.advance(now_s)
            engine.stamp += 1
            for request in action.requests:
                ends = engine.position + self._lengths[int(request.sample_id)]
                heapq.heappush(engine.running, (ends, engine.position, int(request.sample_id)))
                engine.began += engine.position
            changed.append(number)
        return changed
