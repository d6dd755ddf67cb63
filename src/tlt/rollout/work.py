"""Unfinished samples: those that no engine holds yet, and those that an engine holds. Pure."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tlt.contracts import SampleRequest

PROBE = -(2**62)
"""Rank before any length."""


@dataclass(eq=False, slots=True)
class Work:
    """A sample that is not finished."""

    request: SampleRequest
    group: str
    """Requests of one group have the same forecast."""
    expected: int = 0
    """Tokens to expect of the response."""
    attempts: int = 0
    owner: str | None = None
    began: int = -1
    """Progress of the owner when it started the response; -1 before that."""

    @property
    def due(self) -> tuple[int, str]:
        """Progress of the owner at which the response should end."""
        return self.began + self.expected, self.request.sample_id


@dataclass(slots=True)
class _Group:
    number: int
    works: deque[Work] = field(default_factory=deque)
    rank: int | None = None
    probed: bool = False


class Queue:
    """Samples that no engine holds: first those that engines gave back, then the longest.

    Of a group without any forecast, one request goes out before all others, as a probe. The rest of
    the group counts as long as can be until the probe ends. Groups of one length keep their order.
    """

    def __init__(self, known: Callable[[Work], int | None]) -> None:
        self._known = known
        self._back: deque[Work] = deque()
        self._groups: dict[str, _Group] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._count = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, work: Work) -> None:
        self._size += 1
        if work.group not in self._groups:
            self._groups[work.group] = _Group(next(self._count), deque([work]))
            self.reorder(work.group)
        else:
            self._groups[work.group].works.append(work)

    def put_back(self, work: Work) -> None:
        """Queue a sample before all others."""
        self._size += 1
        self._back.appendleft(work)

    def take(self, first: dict[str, None] | None = None) -> Work:
        """Remove and return the next sample, one of the groups `first` if any of them waits.

        Groups of `first` that do not wait are removed from it.
        """
        self._size -= 1
        if self._back:
            return self._back.popleft()
        while first:
            name = next(iter(first))
            if name in self._groups:
                return self._take_of(name)
            del first[name]
        while True:
            rank, number, name = self._heap[0]
            group = self._groups.get(name)
            if group is not None and (group.rank, group.number) == (rank, number):
                return self._take_of(name)
            heapq.heappop(self._heap)

    def _take_of(self, name: str) -> Work:
        group = self._groups[name]
        work = group.works.popleft()
        if not group.works:
            del self._groups[name]
        elif not group.probed:
            group.probed = True
            self.reorder(name)
        return work

    def reorder(self, name: str) -> None:
        """Take a new forecast of a group into account."""
        group = self._groups.get(name)
        if group is None:
            return
        length = self._known(group.works[0])
        if length is None:
            rank = -group.works[0].request.sampling.max_tokens if group.probed else PROBE
        else:
            rank = -length
        if rank != group.rank:
            group.rank = rank
            heapq.heappush(self._heap, (rank, group.number, name))


@dataclass(slots=True)
class Held:
    """The samples that an engine holds, and how far they are.

    All requests of an engine grow by about the same number of tokens in an engine step. So a
    response that ends tells how long those beside it are by now.
    """

    slots: int
    works: dict[str, Work] = field(default_factory=dict)
    """Unfinished samples by id, in the order in which the engine got them."""
    behind: deque[Work] = field(default_factory=deque)
    """Samples behind the slots."""
    progress: int = 0
    """Tokens of a response that would run since the engine's first."""
    _dues: list[tuple[int, str]] = field(default_factory=list)
    """When the running responses should end, in rising order."""
    _tokens: int = 0
    """Sum of `_dues`, and of the tokens to expect of the samples behind the slots."""

    def tokens_left(self) -> int:
        """Return the tokens to expect of all samples."""
        return self._tokens - len(self._dues) * self.progress

    def longest_left(self) -> int:
        """Return the tokens to expect of the running response that ends last."""
        return self._dues[-1][0] - self.progress if self._dues else 0

    def add(self, work: Work) -> None:
        work.began = -1
        self.works[work.request.sample_id] = work
        self.behind.append(work)
        self._tokens += work.expected
        self._start()

    def remove(self, sample_id: str) -> Work:
        """Remove a sample, and start the next one if that frees a slot."""
        work = self.works.pop(sample_id)
        if work.began < 0:
            self.behind.remove(work)
            self._tokens -= work.expected
        else:
            del self._dues[bisect_left(self._dues, work.due)]
            self._tokens -= work.due[0]
            self._start()
        return work

    def _start(self) -> None:
        while self.behind and len(self._dues) < self.slots:
            work = self.behind.popleft()
            work.began = self.progress
            self._tokens += work.began
            insort(self._dues, work.due)

    def ended(self, sample_id: str, tokens: int) -> None:
        """Remove a sample whose response has ended, with so many tokens."""
        began = self.works[sample_id].began
        if began >= 0:
            self.progress = max(self.progress, began + tokens)
        self.remove(sample_id)

    def outgrown(self) -> Iterator[tuple[Work, int]]:
        """Yield each response that is longer than expected by now, and its tokens.

        It should then become twice as long as it is.
        """
        while self._dues and self._dues[0][0] < self.progress:
            due, sample_id = self._dues.pop(0)
            work = self.works[sample_id]
            tokens = self.progress - work.began
            work.expected = 2 * tokens
            self._tokens += work.due[0] - due
            insort(self._dues, work.due)
            yield work, tokens
