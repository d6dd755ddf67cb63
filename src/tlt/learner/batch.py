"""From scored samples to the micro-batches of each rank. Pure.

A group is complete when all its samples are scored; then each sample gets its advantage. A sample
whose reward failed has no score: the learner never sees it. Samples are packed into rows under a
token budget, samples of one prompt together because they share its computation. All ranks get the
same number of rows, because FSDP's collectives must meet, and about the same number of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.contracts import Scored
from tlt.packing import pack

HEAD_CHUNK_TOKENS = 2048
"""Largest number of tokens whose logits are in memory at a time."""
WAITING_ROWS = 2
"""Rows whose captured states may wait on the host: one is being stored while the next one is
computed."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response with its advantage, as the learner gets it."""

    sample_id: str
    problem_number: int
    """The problem's number in the RL step, from 0."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    """Log-probability of each response token in the engine that sampled it."""
    advantage: float
    observed: tuple[tuple[int, int], ...] = ()
    """Parts of the response that an environment said: nothing is learned from their tokens."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def drawn(self) -> Sequence[int]:
        """Return the places of the response's tokens that the policy drew."""
        places = range(len(self.response_ids))
        if not self.observed:
            return places
        said = {place for begin, end in self.observed for place in range(begin, end)}
        return [place for place in places if place not in said]


class Groups:
    """Collects the samples of an RL step and gives out each group when its last sample is scored.

    With `over_step` an advantage depends on the rewards of all groups, and `rest` returns them.
    With `only_signal` groups whose samples all have the advantage 0 are discarded.
    `num_with_signal` counts the complete groups with an advantage that is not 0.
    """

    def __init__(
        self,
        group_size: int,
        advantage: Callable[[Any], Any],
        over_step: bool = False,
        only_signal: bool = False,
    ) -> None:
        self._group_size = group_size
        self._advantage = advantage
        self._over_step = over_step
        self._only_signal = only_signal
        self._kept: list[list[Scored]] = []
        self.discarded: set[int] = set()
        """Numbers of the problems whose groups were discarded."""
        self._open: dict[int, list[Scored]] = {}
        self.num_groups = 0
        self.num_with_signal = 0

    def add(self, scored: Scored) -> list[TrainSample]:
        """Return the samples of the group with their advantages if it is complete, else nothing."""
        group = self._open.setdefault(scored.problem_number, [])
        group.append(scored)
        if len(group) < self._group_size:
            return []
        del self._open[scored.problem_number]
        # In a fixed order: a sum must not depend on which sample ended first.
        group.sort(key=lambda s: s.place)
        self.num_groups += 1
        group = [s for s in group if s.fault is None]
        if self._over_step:
            self._kept += [group] if group else []
            return []
        advantages = self._advantage([s.reward for s in group]) if group else []
        if self._only_signal and not any(advantages):
            self.discarded.add(scored.problem_number)
            return []
        return self._compared(group, advantages)

    def rest(self) -> list[list[TrainSample]]:
        """Return the groups that waited for the end of the rollout, in the order of problems."""
        if not self._kept:
            return []
        groups = sorted(self._kept, key=lambda group: group[0].problem_number)
        self._kept = []
        advantages = self._advantage([[s.reward for s in group] for group in groups])
        return [self._compared(*each) for each in zip(groups, advantages, strict=True)]

    def _compared(self, group: list[Scored], advantages: Sequence[float]) -> list[TrainSample]:
        self.num_with_signal += any(advantages)
        return [
            TrainSample(
                sample_id=s.sample.sample_id,
                problem_number=s.problem_number,
                prompt_ids=s.request.prompt_token_ids,
                response_ids=s.sample.token_ids,
                engine_logprobs=s.sample.logprobs,
                advantage=advantage,
                observed=s.turns.observed,
            )
            for s, advantage in zip(group, advantages, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weight of a response's tokens, and the divisor of a batch's sum.

    Both add up over samples, so neither depends on how a batch is split.
    """

    mean_over: str
    """`tokens`, `samples` or `limit`; see `AlgorithmConfig.mean_over`."""
    max_tokens: int

    def token_weight(self, num_tokens: int) -> float:
        """Return the weight of each token of a response of this length."""
        return 1.0 / max(num_tokens, 1) if self.mean_over == "samples" else 1.0

    def denominator(self, lengths: Sequence[int]) -> float:
        """Return the divisor of the summed loss over responses of these lengths."""
        if self.mean_over == "tokens":
            return float(max(sum(lengths), 1))
        return float(max(len(lengths), 1) * (self.max_tokens if self.mean_over == "limit" else 1))


Block = list[TrainSample]
"""Samples of one prompt, which share it."""


def blocks(samples: Sequence[TrainSample], budget: int) -> list[Block]:
    """Put samples of the same prompt together, as many as the budget holds.

    A sample longer than the budget gets its own block.
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
    """Return the tokens that a block costs: its prompt once, and all responses."""
    return len(block[0].prompt_ids) + sum(len(s.response_ids) for s in block)


def rows_by_rank(
    samples: Sequence[TrainSample], budget: int, num_ranks: int
) -> list[list[list[TrainSample]]]:
    """Return each rank's rows of samples.

    Empty rows fill up the ranks that have fewer. The longest rows are dealt first, each to the rank
    with the fewest tokens among the ranks with the fewest rows.
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
