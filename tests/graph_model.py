"""The CUDA graphs that vLLM captures for a plan of `tlt.strategy.graphs`, and which one it uses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tlt.contracts import Arm
from tlt.strategy.graphs import GraphPlan


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured graph: its number of tokens, and the kind of batch that it serves."""

    num_tokens: int
    query_len: int | None = None
    """Tokens of each request in a full graph; None for a piecewise graph, which takes any batch."""

    @property
    def mode(self) -> str:
        return "PIECEWISE" if self.query_len is None else "FULL"


def graphs_of(plan: GraphPlan, runner: str = "v2") -> set[Graph]:
    """Return all graphs of a plan."""
    graphs = {Graph(size) for size in plan.sizes}
    if runner == "v2" or plan.query_lens == (1,):
        for size, query_len in product(plan.sizes, plan.query_lens):
            num_reqs = -(-size // query_len)
            if num_reqs <= plan.max_num_seqs and num_reqs * query_len <= plan.sizes[-1]:
                graphs.add(Graph(num_reqs * query_len, query_len))
    return graphs


def graph_for(graphs: set[Graph], num_decodes: int, arm: Arm) -> Graph | None:
    """Return the graph of a step; None if the step has more tokens than the largest size."""
    query_len = arm.num_draft_tokens + 1
    num_tokens = num_decodes * query_len
    full = _next({g.num_tokens for g in graphs if g.query_len is not None}, num_tokens)
    piecewise = _next({g.num_tokens for g in graphs if g.query_len is None}, num_tokens)
    if Graph(full, query_len) in graphs:
        return Graph(full, query_len)
    return Graph(piecewise) if piecewise else None


def cases(plan: GraphPlan) -> list[tuple[int, Arm]]:
    """List every (number of decodes, arm) that may be chosen."""
    starts = [0, *(limit for limit, _ in plan.choices)]
    return [
        (n, arm)
        for start, (limit, arms) in zip(starts, plan.choices, strict=False)
        for n in range(start + 1, limit + 1)
        for arm in sorted(arms, key=str)
    ]


def full_share(plan: GraphPlan, runner: str = "v2") -> float:
    """Return the share of `cases` that run as one full graph."""
    graphs = graphs_of(plan, runner)
    served = [graph_for(graphs, n, arm) for n, arm in cases(plan)]
    return sum(graph is not None and graph.mode == "FULL" for graph in served) / len(served)


def _next(sizes: set[int], at_least: int) -> int:
    rising: Sequence[int] = sorted(sizes)
    index = bisect_left(rising, at_least)
    return rising[index] if index < len(rising) else 0
