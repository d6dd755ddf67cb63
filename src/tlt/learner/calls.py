"""Calls from the driver to the ranks of the learner. Pure; `tlt.learner.actor` has the Ray side.

A call that arrived twice would add the same gradients twice, or take an optimizer step twice, and a
call that was lost would leave out a part of an RL step. So calls of one rank have numbers, and a
rank refuses a call that is not the next one. The driver then starts all ranks again from the last
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from tlt.learner.actor import LearnerActor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RankFailed(RuntimeError):
    """A call to a rank failed."""


class RankGone(RankFailed):
    """The rank's process is dead."""


class RankHandle(Protocol):
    """A rank in another process; a call that fails raises `RankFailed`."""

    async def call(self, command: Callable[[LearnerActor, *Ts], T], *args: *Ts) -> T:
        """Give a command to the thread that trains."""
        ...

    async def call_beside(self, command: Callable[[LearnerActor, *Ts], T], *args: *Ts) -> T:
        """Run a command that waits for files, in parallel to training."""
        ...

    async def kill(self) -> None:
        """Return when the process holds no core and no memory."""
        ...


class InOrder:
    """A rank's record of the calls that it has taken."""

    def __init__(self) -> None:
        self._taken = 0

    def check(self, number: int, method: str) -> None:
        """Take the call with this number; refuse all but the next one."""
        if number != self._taken + 1:
            raise RankFailed(
                f"call {number} ({method}) came after call {self._taken}: nothing is done twice or "
                "left out"
            )
        self._taken = number
