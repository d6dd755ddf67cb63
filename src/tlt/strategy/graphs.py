"""Plans the CUDA graphs that a GPU engine captures for its arms.

A decode step with K drafts a request is one batch of equal query length K + 1: n requests are
n * (K + 1) tokens. Without a captured graph of at least that size the step is launched kernel by
kernel. vLLM takes one list of sizes in tokens, for all arms; its own defaults end at 512 tokens
(1024 on Blackwell), which is 56 requests with 8 drafts. This module makes the list from the arms.

vLLM 0.32 uses the list as follows, by its source. `tests/graph_model.py` says the same in code, and
`tests/integration/test_graph_plan.py` checks it against vLLM's classes:

- Piecewise graphs (attention left out) exist once per size and serve any batch up to that size.
  They also serve steps that prefill.
- Full graphs of decodes exist per query length. Its V2 runner, the default on GPUs, captures each
  size, rounded up to a multiple of the query length, for *every* draft length in
  `num_speculative_tokens_per_batch_size`, up to `max_num_seqs` requests and the largest size. So
  their number is sizes times draft lengths: few sizes matter more than the buckets of a strategy.
  Draft lengths that the schedule does not name get none, neither for verification nor for the
  drafter's own loop: `draft_schedule` names them all. A table of `max_num_seqs` entries has room
  for as many lengths; the longest ones win.
- vLLM considers only the full graphs of the next larger token count. If none of them has the
  batch's query length, the step takes a piecewise graph although a larger full graph fits.
  Sizes that are multiples of all query lengths never miss. So a few draft lengths whose query
  lengths have a small common multiple, such as K = 0, 1, 3, 7, beat many.
- The drafter's passes after the first have one token a request, and full graphs only up to
  `max_num_seqs` tokens: that size is always in the list.
- The V1 runner has full graphs of one query length only, and vLLM replaces them by piecewise
  graphs when the draft length changes at run time. The same list of sizes serves the V1 runner.
- Attention backends that cannot capture batches of several tokens a request make vLLM fall back
  to piecewise graphs on its own.

A draft is verified one step after its arm was chosen. Requests that prefilled in between have
joined by then, so a step can be larger than its arm's bucket. A step beyond the largest size runs
without a graph, slower but correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd, lcm
from typing import Any

from tlt.contracts import Arm, Strategy

Choices = Sequence[tuple[int, frozenset[Arm]]]
"""Pairs of (largest number of decodes, arms that may be chosen), rising to `max_num_seqs`."""
STEPS_PER_DOUBLING = 4
"""Sizes between a size and its double."""
MIXED_TOKENS = 512
"""Largest size for steps that also prefill: vLLM's own largest."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The capture sizes of one engine."""

    choices: Choices
    max_num_seqs: int
    sizes: tuple[int, ...]
    """Capture sizes in tokens, rising."""
    query_lens: tuple[int, ...]
    """Query lengths that get full graphs, rising."""

    @classmethod
    def for_arms(
        cls,
        choices: Choices,
        max_num_seqs: int,
        max_num_batched_tokens: int | None = None,
        mixed_tokens: int = MIXED_TOKENS,
    ) -> GraphPlan:
        """Plan few sizes that serve every number of decodes with every arm allowed there.

        Sizes double in `STEPS_PER_DOUBLING` equal steps, 1, 2, ..., 8, 10, 12, 14, 16, 20, ...:
        padding adds less than 1 / steps of a batch, and less than one request where a full graph
        rounds up. From where that allows it, sizes are multiples of every query length. The
        largest batch of each query length is also a size, since an engine starts every
        rollout with all its slots taken.

        Piecewise graphs up to `mixed_tokens` serve steps that also prefill. No step holds more than
        `max_num_batched_tokens`.
        """
        widest = _widest_batches(choices, max_num_seqs)
        top = max(mixed_tokens, max_num_seqs, *(n * q for q, n in widest.items()))
        fine, common = gcd(*widest), lcm(*widest)
        turn = STEPS_PER_DOUBLING * common
        low = {fine * step for step in _steps(min(turn, top) // fine)}
        high = {common * step for step in _steps(top // common)}
        sizes = low | {size for size in high if size >= turn} | {max_num_seqs, top}
        sizes |= {n * query_len for query_len, n in widest.items()}
        sizes = {min(size, max_num_batched_tokens or size) for size in sizes}
        lens = sorted(widest)[-max_num_seqs:]
        return cls(choices, max_num_seqs, tuple(sorted(sizes)), tuple(lens))

    def compilation_config(self) -> dict[str, Any]:
        """Return the settings to merge into vLLM's `compilation_config`."""
        return {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": list(self.sizes),
        }

    def draft_schedule(self) -> list[list[int]]:
        """Return a `num_speculative_tokens_per_batch_size` that names every draft length.

        vLLM captures the lengths that the schedule names. The batch sizes in the schedule do not
        matter: our scheduler sets the length of each step.
        """
        schedule = [[n, n, query_len - 1] for n, query_len in enumerate(self.query_lens, start=1)]
        schedule[-1][1] = 1_000_000
        return schedule


def choices_of(strategy: Strategy, max_num_seqs: int) -> Choices:
    """Return the arms that a strategy may choose at each number of decodes."""
    allowed = [(n, strategy.arms(n)) for n in range(1, max_num_seqs + 1)]
    runs = groupby(allowed, key=lambda entry: entry[1])
    return [(list(run)[-1][0], arms) for arms, run in runs]


def _widest_batches(choices: Choices, max_num_seqs: int) -> dict[int, int]:
    """Return the largest number of decodes of each query length."""
    limits = [limit for limit, _ in choices]
    rising = limits == sorted(set(limits)) and all(limit > 0 for limit in limits)
    if not limits or not rising or limits[-1] != max_num_seqs:
        raise ValueError(
            f"choices must rise to max_num_seqs = {max_num_seqs}, got {limits}; "
            "e.g. [(8, {off, eagle3:3}), (256, {off})]"
        )
    if not all(arms for _, arms in choices):
        raise ValueError("choices: every bucket needs at least one arm")
    return {arm.num_draft_tokens + 1: limit for limit, arms in choices for arm in arms}


def _steps(last: int) -> list[int]:
    """Return 1, 2, 3, ... up to `last`, in steps that double as the numbers double."""
    if last < 1:
        return []
    steps, step = [1], 1
    while steps[-1] + step <= last:
        steps.append(steps[-1] + step)
        if steps[-1] == 2 * STEPS_PER_DOUBLING * step:
            step *= 2
    return steps
