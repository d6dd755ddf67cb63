"""A rollout in simulated time: production strategy and dispatcher over modelled engines.

All requests of an engine grow at the same pace, which depends on their number and their context.
Between two events of an engine its requests grow evenly.

A player runs a strategy engine step by engine step at a few batch sizes, from large to small as in
a rollout, until the strategy settles on an arm. That takes some dozens of engine steps per batch
size instead of the thousands of a real rollout. The arm gives the pace at that batch size. The time
lost to trials is added once.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.contracts import OFF, Arm, SampleRequest, SamplingSpec, StepContext, StepReport, Strategy
from tlt.rollout.dispatch import Assign, Dispatcher
from tlt.strategy.step_time import batch_bucket
from tlt.timing.model import Drafting, EngineModel

STEPS = 32
"""Engine steps to play at each batch size."""
NOISE = 0.05
"""Relative standard deviation of step times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per token of a request, relative to plain decoding."""

    ratios: Any
    """Ratios by number of running requests; the first entry is for none."""
    trying_s: float
    """Seconds lost to trials in one rollout."""


class Player:
    """The strategy of one engine over the rollouts of a run; its estimates persist."""

    def __init__(self, strategy: Strategy, model: EngineModel, seed: int = 0) -> None:
        self._strategy = strategy
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._step = 0
        self._verified = OFF

    def rollout(self, drafting: Drafting, version: int, most: int, context: float) -> Pace:
        """Play a rollout that begins with `most` requests."""
        # The batch sizes that a strategy distinguishes, largest first.
        sizes = sorted({min(most, batch_bucket(n)) for n in range(1, most + 1)}, reverse=True)
        ratios = np.ones(most + 1)
        trying_s = 0.0
        for running in sizes:
            settled_s, lost_s = self._settle(running, context, drafting, version)
            ratios[running] = settled_s / self._model.step_s(OFF, running, context)
            trying_s += lost_s
        known = np.array(sizes[::-1])
        ratios[1:] = np.interp(np.arange(1, most + 1), known, ratios[known])
        return Pace(ratios, trying_s)

    def _settle(
        self, running: int, context: float, drafting: Drafting, version: int
    ) -> tuple[float, float]:
        """Return the seconds per token once the strategy has settled, and those lost before."""
        seconds = tokens = 0.0
        decided: list[Arm] = []
        for _ in range(STEPS):
            proposed = self._strategy.decide(
                StepContext(self._step, running, 0, 0, drafter_version=version)
            )
            report = self._one_step(running, context, drafting, proposed, version)
            self._strategy.observe(report)
            seconds += report.elapsed_s
            tokens += report.num_output_tokens / running
            decided.append(proposed)
            self._verified = proposed
            self._step += 1
        arm = Counter(decided[STEPS // 2 :]).most_common(1)[0][0]
        settled_s = self._model.step_s(arm, running, context) / drafting.tokens(arm)
        return settled_s, max(0.0, float(seconds - tokens * settled_s))

    def _one_step(
        self, running: int, context: float, drafting: Drafting, proposed: Arm, version: int
    ) -> StepReport:
        verified = self._verified
        accepted_at = []
        left, before = running, 1.0
        for position in range(verified.num_draft_tokens):
            rate = drafting.rate(verified.drafter, position)
            left = int(self._rng.binomial(left, min(1.0, rate / before))) if left else 0
            before = rate if rate > 0 else 1.0
            accepted_at.append(left)
        both_s = sum(self._model.step_s(arm, running, context) for arm in (verified, proposed))
        drafts = running if verified.num_draft_tokens else 0
        return StepReport(
            step=self._step,
            verified=verified,
            proposed=proposed,
            num_decodes=running,
            num_prefill_tokens=0,
            num_drafts=drafts,
            num_draft_tokens=drafts * verified.num_draft_tokens,
            num_accepted_tokens=sum(accepted_at),
            accepted_at=tuple(accepted_at),
            num_output_tokens=running + sum(accepted_at),
            elapsed_s=float(both_s / 2) * math.exp(self._rng.normal(0, NOISE)),
            drafter_version=version,
        )


class Rollout:
    """The requests of one RL step, dispatched to engines; `play` generates them.

    The dispatcher fills all engines at first. From then on it refills only the engine that has just
    finished a request, because all others are full or the queue is empty.
    """

    def __init__(self, lengths: Sequence[float], num_engines: int, slots: int) -> None:
        self._lengths = lengths
        self._running: list[list[tuple[float, float, int]]] = [[] for _ in range(num_engines)]
        """A heap for every engine: where a request ends, where it began, and its number. Positions
        count the tokens of a request that runs since the rollout began."""
        self._position = [0.0] * num_engines
        self._began = [0.0] * num_engines
        """Sum of the positions at which the running requests began, by engine."""
        self._dispatcher = Dispatcher(prefetch=0)
        for number in range(num_engines):
            self._dispatcher.engine_ready(str(number), slots)
        spec = SamplingSpec(max_tokens=1)  # the dispatcher knows no lengths
        self._dispatcher.submit(SampleRequest(str(n), (), spec) for n in range(len(lengths)))
        self._assign()
        self.most = max(map(len, self._running))
        """Largest number of requests that run on one engine."""
        self.longest = [max(running)[0] for running in self._running if running]
        """Longest response among the first to start, by engine."""

    def play(self, row_s: Any, context_s: Any, prompt_tokens: float) -> tuple[Any, Any]:
        """Return the engine of every request, and when it ends.

        An engine step of n requests takes `row_s[n]` seconds, and `context_s[n]` for every token of
        their contexts.
        """
        rows, contexts = np.asarray(row_s).tolist(), np.asarray(context_s).tolist()
        owner: Any = np.zeros(len(self._lengths), dtype=int)
        end_s: Any = np.zeros(len(self._lengths))
        events: list[tuple[float, int]] = []

        def schedule(number: int, now_s: float) -> None:
            running, position = self._running[number], self._position[number]
            if count := len(running):
                tokens = running[0][0] - position
                context = count * (prompt_tokens + position + tokens / 2) - self._began[number]
                pace_s = rows[count] + contexts[count] * context
                heapq.heappush(events, (now_s + tokens * pace_s, number))

        for number in range(len(self._running)):
            schedule(number, 0.0)
        while events:
            now_s, number = heapq.heappop(events)
            self._position[number], began, request = heapq.heappop(self._running[number])
            self._began[number] -= began
            owner[request], end_s[request] = number, now_s
            self._dispatcher.finished(str(number), [str(request)])
            assert self._assign() <= {number}, "an engine had a free slot while requests waited"
            schedule(number, now_s)
        return owner, end_s

    def _assign(self) -> set[int]:
        """Start what the dispatcher assigns; return the engines that got something."""
        changed = set()
        for action in self._dispatcher.actions():
            assert isinstance(action, Assign), "nothing waits behind slots without prefetching"
            number = int(action.engine)
            position = self._position[number]
            for request in action.requests:
                sample = int(request.sample_id)
                ends = position + self._lengths[sample]
                heapq.heappush(self._running[number], (ends, position, sample))
                self._began[number] += position
            changed.add(number)
        return changed
