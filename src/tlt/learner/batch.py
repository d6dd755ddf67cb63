"""From scored samples to the micro-batches of each rank. Pure.

A group is complete when all its samples are scored; then each gets its advantage. Complete samples
are packed into rows under a token budget, samples of one prompt together because they share it, and
rows are dealt to the ranks so that all ranks have the same number of rows (FSDP's collectives must
meet) and about the same number of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt.packing import pack


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One response with its reward."""

    sample_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    """Of the response's tokens, in the engine that sampled them."""
    reward: float


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response with its advantage: what the learner learns from."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class Groups:
    """Collects the samples of a step; gives a group out when its last sample is scored."""

    def __init__(self, group_size: int, advantage: Callable[[Sequence[float]], list[float]]):
        self._group_size = group_size
        self._advantage = advantage
        self._open: dict[str, list[ScoredSample]] = {}
        self.num_groups = 0
        self.num_with_signal = 0

    def add(self, sample: ScoredSample) -> list[TrainSample]:
        """The group's samples with their advantages, once it is complete; else nothing."""
        group = self._open.setdefault(sample.group_id, [])
        group.append(sample)
        if len(group) < self._group_size:
            return []
        del self._open[sample.group_id]
        # In a fixed order, so that a sum does not depend on which sample ended first.
        group.sort(key=lambda s: s.sample_id)
        advantages = self._advantage([s.reward for s in group])
        self.num_groups += 1
        self.num_with_signal += any(advantages)
        return [
            TrainSample(s.sample_id, s.prompt_ids, s.response_ids, s.engine_logprobs, advantage)
            for s, advantage in zip(group, advantages, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Weighting:
    """How much a response's tokens count, and what the sum of a batch is divided by.

    Both add up over samples, so that neither depends on how a batch is split.
    """

    mean_over: str
    """`tokens`, `samples` or `limit`; see `AlgorithmConfig.mean_over`."""
    max_tokens: int

    def token_weight(self, num_tokens: int) -> float:
        return 1.0 / max(num_tokens, 1) if self.mean_over == "samples" else 1.0

    def denominator(self, lengths: Sequence[int]) -> float:
        if self.mean_over == "tokens":
            return float(max(sum(lengths), 1))
        return float(len(lengths) * (self.max_tokens if self.mean_over == "limit" else 1))


Block = list[TrainSample]
"""Samples of one prompt, which share it."""


def blocks(samples: Sequence[TrainSample], budget: int) -> list[Block]:
    """Samples of the same prompt together, as many as the budget holds.

    A sample longer than the budget has a block to itself.
    """
    found: list[Block] = []
    latest: dict[tuple[int, ...], tuple[Block, int]] = {}
    for sample in samples:
        block, size = latest.get(sample.prompt_ids, ([], budget))
        if size + len(sample.response_ids) > budget:
            block, size = [], len(sample.prompt_ids)
            found.append(block)
        block.append(sample)
        latest[sample.prompt_ids] = block, size + len(sample.response_ids)
    return found


def block_tokens(block: Block) -> int:
    return len(block[0].prompt_ids) + sum(len(s.response_ids) for s in block)


def rows_by_rank(
    samples: Sequence[TrainSample], budget: int, num_ranks: int
) -> list[list[list[TrainSample]]]:
    """For each rank its rows of samples.

    Every rank gets the same number of rows, empty ones to make up; the longest rows are dealt
    first, always to the rank with the fewest tokens among those with the fewest rows.
    """
    parts = blocks(samples, budget)
    lengths = [block_tokens(block) for block in parts]
    rows = sorted(pack(lengths, budget), key=lambda row: (-sum(lengths[i] for i in row), row))
    dealt: list[list[list[TrainSample]]] = [[] for _ in range(num_ranks)]
    next_rank = [(0, 0, rank) for rank in range(num_ranks)]  # a heap of rows, tokens, rank
    for row in rows:
        num_rows, tokens, rank = next_rank[0]
        dealt[rank].append([sample for index in row for sample in parts[index]])
        tokens += sum(lengths[i] for i in row)
        heapq.heapreplace(next_rank, (num_rows + 1, tokens, rank))
    longest = max(len(mine) for mine in dealt)
    for mine in dealt:
        mine.extend([] for _ in range(longest - len(mine)))
    return dealt
