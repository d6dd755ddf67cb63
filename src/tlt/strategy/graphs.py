"""Which CUDA graphs a GPU engine captures for the arms it may choose, and roughly what they take.

A decode step with K drafts a request is one batch of equal query length K + 1: n requests are
n * (K + 1) tokens. Without a captured graph of at least that size the step is launched kernel by
kernel. vLLM takes one list of sizes in tokens, for all arms; its own defaults end at 512 tokens
(1024 on Blackwell), which is 56 requests with 8 drafts. This module makes the list from the arms.

What vLLM 0.32 makes of it, read in its source and checked against its classes by
`tests/integration/test_graph_plan.py`:

- Piecewise graphs (attention left out) exist once per size and serve any batch up to that size.
  They also serve steps that prefill.
- Full graphs of decodes exist per query length. Its V2 runner, the default on GPUs, captures
  each size, rounded up to a multiple of the query length, for *every* draft length in
  `num_speculative_tokens_per_batch_size`, up to `max_num_seqs` requests and the largest size. So
  their number is sizes times draft lengths: few sizes matter more than the buckets of a strategy.
  Draft lengths that the schedule does not name get none, neither for verification nor for the
  drafter's own loop: `draft_schedule` names them all. A table of `max_num_seqs` entries has
  room for as many lengths; the longest win.
- Of full graphs only those of the next larger token count are looked at. If none of them has
  the batch's query length, the step takes a piecewise graph although a larger full one fits.
  Sizes that are multiples of all query lengths never miss. So a few draft lengths whose query
  lengths have a small common multiple, such as K = 0, 1, 3, 7, beat many: see `full_share`.
- The drafter's passes after the first have one token a request, and full graphs only up to
  `max_num_seqs` tokens; hence that size is always in the list.
- The V1 runner knows full graphs of one query length only, and vLLM replaces them by piecewise
  ones when the draft length changes at run time. The list of sizes is right for it too.
- Attention backends that cannot capture batches of several tokens a request make vLLM fall back
  to piecewise graphs on its own.

A draft is verified one step after it was chosen. Requests that prefilled in between have joined
by then, so a step can be larger than the bucket of its arm; past the largest size it runs without
a graph, slower but correct.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import gcd, lcm
from typing import Any, Literal

from tlt.contracts import Arm, StepContext, Strategy
from tlt.strategy.spec import ByBatchSize

Choices = Sequence[tuple[int, frozenset[Arm]]]
"""(largest number of decodes, arms that may be chosen up to there), rising to `max_num_seqs`."""
Runner = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured graph: how many tokens it runs, and for which kind of batch."""

    num_tokens: int
    query_len: int | None = None
    """Tokens of each request in a full graph; None for a piecewise graph, which takes any."""

    @property
    def mode(self) -> Literal["FULL", "PIECEWISE"]:
        return "PIECEWISE" if self.query_len is None else "FULL"


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The capture sizes of one engine and the graphs that vLLM makes from them."""

    choices: tuple[tuple[int, frozenset[Arm]], ...]
    max_num_seqs: int
    sizes: tuple[int, ...]
    """Capture sizes in tokens, rising."""
    query_lens: tuple[int, ...]
    """Query lengths that get full graphs, rising."""
    graphs: frozenset[Graph]

    @classmethod
    def for_arms(
        cls,
        choices: Choices,
        max_num_seqs: int,
        *,
        steps_per_doubling: int = 4,
        mixed_tokens: int = 512,
        max_num_batched_tokens: int | None = None,
        runner: Runner = "v2",
    ) -> GraphPlan:
        """Few sizes that serve every number of decodes with every arm allowed there.

        Sizes double in `steps_per_doubling` equal steps, 1, 2, ..., 8, 10, 12, 14, 16, 20, ...:
        padding adds less than 1 / steps of a batch, and less than one request where a full graph
        rounds up. From where that allows it, sizes are multiples of every query length. The
        largest batch of each query length is a size of its own, since an engine starts every
        rollout with all its slots taken.

        `mixed_tokens` keeps piecewise graphs for steps that also prefill; its default is where
        vLLM's own sizes end. A step never holds more than `max_num_batched_tokens`.
        """
        widest = _widest_batches(choices, max_num_seqs)
        top = max(mixed_tokens, max_num_seqs, *(n * q for q, n in widest.items()))
        fine, common = gcd(*widest), lcm(*widest)
        turn = steps_per_doubling * common
        low = {fine * step for step in _steps(min(turn, top) // fine, steps_per_doubling)}
        high = {common * step for step in _steps(top // common, steps_per_doubling)}
        sizes = low | {size for size in high if size >= turn} | {max_num_seqs, top}
        sizes |= {n * query_len for query_len, n in widest.items()}
        capped = {min(size, max_num_batched_tokens or size) for size in sizes}
        return cls._capturing(choices, max_num_seqs, capped, runner)

    @classmethod
    def everything(
        cls, arms: Collection[Arm], max_num_seqs: int, *, runner: Runner = "v2"
    ) -> GraphPlan:
        """For comparison: every arm at every batch size that vLLM captures for a single arm.

        Those are 1, 2, 4, then every 8th number of requests and from 256 on every 16th.
        """
        counts = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs}
        sizes = {n * _query_len(arm) for arm in arms for n in counts if n <= max_num_seqs}
        return cls._capturing([(max_num_seqs, frozenset(arms))], max_num_seqs, sizes, runner)

    @classmethod
    def _capturing(
        cls, choices: Choices, max_num_seqs: int, sizes: Collection[int], runner: Runner
    ) -> GraphPlan:
        lens = sorted(_widest_batches(choices, max_num_seqs))[-max_num_seqs:]
        graphs = {Graph(size) for size in sizes}
        if runner == "v2" or lens == [1]:
            for size, query_len in product(sizes, lens):
                num_reqs = -(-size // query_len)
                if num_reqs <= max_num_seqs and num_reqs * query_len <= max(sizes):
                    graphs.add(Graph(num_reqs * query_len, query_len))
        return cls(
            tuple(choices), max_num_seqs, tuple(sorted(sizes)), tuple(lens), frozenset(graphs)
        )

    def graph(self, num_decodes: int, arm: Arm) -> Graph | None:
        """The graph that runs so many decodes with this arm's drafts.

        None where the step would hold more tokens than the largest size.
        """
        query_len = _query_len(arm)
        num_tokens = num_decodes * query_len
        full = Graph(_next(self._full_tokens(), num_tokens), query_len)
        if full in self.graphs:
            return full
        piecewise = Graph(_next(self.sizes, num_tokens))
        return piecewise if piecewise in self.graphs else None

    def full_share(self) -> float:
        """Share of the possible (number of decodes, arm) that run as one full graph."""
        served = [self.graph(n, arm) for n, arm in self.cases()]
        return sum(graph is not None and graph.mode == "FULL" for graph in served) / len(served)

    def cases(self) -> list[tuple[int, Arm]]:
        """Every (number of decodes, arm) that may be chosen."""
        starts = [0, *(limit for limit, _ in self.choices)]
        return [
            (n, arm)
            for start, (limit, arms) in zip(starts, self.choices, strict=False)
            for n in range(start + 1, limit + 1)
            for arm in sorted(arms, key=str)
        ]

    def estimated_bytes(self, *, bytes_per_graph: int = 2**20, bytes_per_token: int = 2**15) -> int:
        """A rough estimate of the memory of the target's graphs, only to compare plans with.

        A fixed part per graph, and a part per token that a graph was captured for. The defaults
        are assumptions, not measurements: 1 MiB is the least that vLLM's own profiling expects
        of a graph, 32 KiB are four bfloat16 states of width 4096. Graphs share a pool, so the
        truth may be lower; it stands in vLLM's log ("Graph capturing finished"). A drafter's
        graphs come on top: the same sizes over its one layer.
        """
        num_tokens = sum(graph.num_tokens for graph in self.graphs)
        return len(self.graphs) * bytes_per_graph + num_tokens * bytes_per_token

    def compilation_config(self) -> dict[str, Any]:
        """What to merge into vLLM's `compilation_config`."""
        return {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": list(self.sizes),
        }

    def draft_schedule(self) -> list[list[int]]:
        """A `num_speculative_tokens_per_batch_size` that names every draft length.

        vLLM reads from it which lengths to capture. Which batch size it gives them to does not
        matter: the length of each step is set by our scheduler.
        """
        schedule = [[n, n, query_len - 1] for n, query_len in enumerate(self.query_lens, start=1)]
        schedule[-1][1] = 1_000_000
        return schedule

    def _full_tokens(self) -> list[int]:
        return sorted({g.num_tokens for g in self.graphs if g.query_len is not None})


def choices_of(strategy: Strategy, max_num_seqs: int) -> Choices:
    """Which arms a strategy may choose at which number of decodes.

    A table can be asked; of every other strategy any arm is expected anywhere.
    """
    if not isinstance(strategy, ByBatchSize):
        return [(max_num_seqs, strategy.arms())]
    decided = [
        (n, strategy.decide(StepContext(step=0, num_decodes=n, num_prefills=0, num_waiting=0)))
        for n in range(1, max_num_seqs + 1)
    ]
    runs = groupby(decided, key=lambda entry: entry[1])
    return [(list(run)[-1][0], frozenset({arm})) for arm, run in runs]


def _query_len(arm: Arm) -> int:
    return arm.num_draft_tokens + 1


def _widest_batches(choices: Choices, max_num_seqs: int) -> dict[int, int]:
    """The largest number of decodes that each query length may meet."""
    limits = [limit for limit, _ in choices]
    rising = limits == sorted(set(limits)) and all(limit > 0 for limit in limits)
    if not limits or not rising or limits[-1] != max_num_seqs:
        raise ValueError(
            f"choices must rise to max_num_seqs = {max_num_seqs}, got {limits}; "
            "e.g. [(8, {off, eagle3:3}), (256, {off})]"
        )
    if not all(arms for _, arms in choices):
        raise ValueError("choices: every bucket needs at least one arm")
    return {_query_len(arm): limit for limit, arms in choices for arm in arms}


def _steps(last: int, per_doubling: int) -> list[int]:
    """1, 2, 3, ... up to `last`, in steps that double each time the numbers have doubled."""
    if last < 1:
        return []
    steps, step = [1], 1
    while steps[-1] + step <= last:
        steps.append(steps[-1] + step)
        if steps[-1] == 2 * per_doubling * step:
            step *= 2
    return steps


def _next(rising: Sequence[int], at_least: int) -> int:
    """The first of `rising` that is large enough; 0 if none is."""
    index = bisect_left(rising, at_least)
    return rising[index] if index < len(rising) else 0
