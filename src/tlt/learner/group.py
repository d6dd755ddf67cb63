"""The driver's handle on all ranks of the learner.

Ranks start together and are lost together. When one rank dies, the others wait in a collective for
ever, so the driver kills them all and starts them again from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from tlt.errors import CheckpointFailed, LearnerLost
from tlt.learner.actor import LearnerActor, LearnerPlan, RayRank, Rows
from tlt.learner.batch import TrainSample, rows_by_rank
from tlt.learner.calls import RankFailed, RankGone, RankHandle
from tlt.node.cluster import this_node
from tlt.node.weights import SharedWeights
from tlt.states.writer import Stored

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BLAME_S = 2.0
"""Seconds to wait, after a rank failed, for the news that another one is gone."""


class LearnerGroup:
    """All ranks, as the driver sees them; a failure raises `LearnerLost`, which names the rank."""

    def __init__(
        self,
        plan: LearnerPlan,
        place: Callable[[int], Mapping[str, Any]] = lambda rank: {"num_cpus": 0},
        spawn: Callable[[LearnerPlan, int, Mapping[str, Any]], RankHandle] = RayRank,
        here: Callable[[], str] = this_node,
    ) -> None:
        self._plan = plan
        self._place = place
        self._spawn = spawn
        self._here = here
        self._ranks: list[RankHandle] = []
        self._nodes: list[str] = []
        self._connected: Any = None
        """Engines that the ranks are connected with, to send the policy from GPU to GPU."""

    async def start(self, restore: Path | None = None) -> list[int]:
        """Start all ranks from a checkpoint or from the model, and return their process ids."""
        for rank in range(self._plan.num_ranks):
            self._ranks.append(self._spawn(self._plan, rank, self._place(rank)))
        self._nodes = await self._all(LearnerActor.node)
        saved = None if restore is None else str(restore / "learner")
        on_one_node = len(set(self._nodes)) == 1
        (meeting,) = await self._gather(
            LearnerActor.meeting, {0: self._ranks[0].call(LearnerActor.meeting, on_one_node)}
        )
        pids: list[int] = await self._each(
            LearnerActor.start, [(meeting, saved, self._nodes.count(node)) for node in self._nodes]
        )
        if self._plan.buffer is not None:
            await self._on_nodes(
                LearnerActor.restore_buffer,
                lambda node: (str(restore / f"buffer-{node}") if restore else None,),
            )
        return pids

    async def stop(self) -> None:
        """End all ranks and wait until they hold no core and no memory."""
        self._connected = None
        ranks, self._ranks = self._ranks, []
        ends = await asyncio.gather(*(rank.kill() for rank in ranks), return_exceptions=True)
        for rank, end in enumerate(ends):
            if isinstance(end, Exception):
                logger.warning("learner rank %d could not be ended (%r)", rank, end)

    # --- the update ---------------------------------------------------------------------------

    async def accumulate(self, samples: Sequence[TrainSample], rl_step: int) -> None:
        """Add the gradients of these samples."""
        if samples:
            await self._each(
                LearnerActor.accumulate, [(rows, rl_step) for rows in self._rows(samples)]
            )

    async def remember_logprobs(self, samples: Sequence[TrainSample]) -> None:
        """Keep the log-probabilities of one optimizer step's samples, before the first one."""
        await self._each(LearnerActor.remember_logprobs, [(rows,) for rows in self._rows(samples)])

    async def forget_logprobs(self) -> None:
        await self._all(LearnerActor.forget_logprobs)

    async def step(self, denominator: float, max_gap: float) -> tuple[UpdateReport, Stored]:
        """Make an optimizer step of the added gradients.

        Return its report, and what became of the samples captured on all nodes.
        """
        answers = await self._all(LearnerActor.step, denominator, max_gap)
        reports, stored = zip(*answers, strict=True)
        first = {node: rank for rank, node in reversed(list(enumerate(self._nodes)))}
        return reports[0], Stored(
            num_samples=sum(own.num_samples for own in stored),
            num_dropped=sum(own.num_dropped for own in stored),
            num_bytes=sum(stored[rank].num_bytes for rank in first.values()),
        )

    def _rows(self, samples: Sequence[TrainSample]) -> list[Rows]:
        return rows_by_rank(samples, self._plan.row_tokens, self._plan.num_ranks)

    # --- weights and checkpoints --------------------------------------------------------------

    async def publish(self, dtype: str) -> SharedWeights:
        """Return the current policy's weights for the engines, in this node's shared memory."""
        same_node = self._nodes[0] == self._here()
        return await self._adopt((await self._all(LearnerActor.publish, dtype, same_node))[0])

    async def send(
        self, route: Any, dtype: str, version: int, keep: Sequence[str]
    ) -> SharedWeights:
        """Send the policy to the engines of a route, and return the tensors named in `keep`."""
        connected, self._connected = self._connected, None  # a connection that fails is lost
        if route.engines != connected:
            await self._all(LearnerActor.connect, route, dtype)
        same_node = self._nodes[0] == self._here()
        kept = (await self._all(LearnerActor.send, version, tuple(keep), same_node))[0]
        self._connected = route.engines
        return await self._adopt(kept)

    async def free_cache(self) -> None:
        """Give the memory that ranks keep for later back to the devices' other processes."""
        await self._all(LearnerActor.free_cache)

    async def _adopt(self, weights: Any) -> SharedWeights:
        if isinstance(weights, str):
            try:
                return SharedWeights.adopt(weights)
            except FileNotFoundError:  # the rank has died meanwhile
                raise LearnerLost("a learner rank is gone, and its weights with it") from None
        return await asyncio.to_thread(SharedWeights.of_bytes, weights)

    async def save_policy(self, folder: Path, dtype: str) -> None:
        await self._all(LearnerActor.save_policy, str(folder), dtype)

    async def save(self, folder: Path) -> None:
        """Copy the learner's state; `wait_saved` returns when the copy is on disk."""
        await self._all(LearnerActor.save, str(folder / "learner"))

    async def wait_saved(self, folder: Path, earlier: Path | None, rl_step: int) -> None:
        """Wait until the state is on disk, and add the samples captured up to this RL step."""
        calls = {
            rank: handle.call_beside(LearnerActor.wait_saved)
            for rank, handle in enumerate(self._ranks)
        }
        faults = await self._gather(LearnerActor.wait_saved, calls)
        if self._plan.buffer is not None:
            faults += await self._on_nodes(
                LearnerActor.save_buffer,
                lambda node: (
                    str(folder / f"buffer-{node}"),
                    str(earlier / f"buffer-{node}") if earlier else None,
                    rl_step,
                ),
            )
        if any(faults):
            raise CheckpointFailed(next(fault for fault in faults if fault))

    # --- calls --------------------------------------------------------------------------------

    async def _all(self, command: Callable[[LearnerActor, *Ts], T], *args: *Ts) -> list[T]:
        return await self._each(command, [args] * len(self._ranks))

    async def _each(
        self, command: Callable[[LearnerActor, *Ts], T], args: Sequence[tuple[*Ts]]
    ) -> list[T]:
        """Give a command to all ranks, each with its own arguments."""
        pairs = zip(self._ranks, args, strict=True)
        calls = {rank: handle.call(command, *own) for rank, (handle, own) in enumerate(pairs)}
        return await self._gather(command, calls)

    async def _on_nodes(
        self, command: Callable[[LearnerActor, *Ts], T], args: Callable[[int], tuple[*Ts]]
    ) -> list[T]:
        """Run a command on the first rank of every node, in parallel to training."""
        first = [self._nodes.index(node) for node in dict.fromkeys(self._nodes)]
        calls = {
            rank: self._ranks[rank].call_beside(command, *args(number))
            for number, rank in enumerate(first)
        }
        return await self._gather(command, calls)

    async def _gather(
        self, command: Callable[..., object], calls: Mapping[int, Awaitable[T]]
    ) -> list[T]:
        """Return the answers of ranks, in order; `LearnerLost` names the ranks that are lost."""
        if not calls:
            raise LearnerLost(f"the learner has no ranks ({command.__name__}): they start again")
        waiting = {asyncio.ensure_future(call): rank for rank, call in calls.items()}
        limit_s = self._plan.timeout_s
        try:
            done, late = await asyncio.wait(
                waiting, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if late and any(call.exception() for call in done):
                # A rank that loses another one in a collective often fails before that one's death
                # is known.
                done, late = await asyncio.wait(waiting, timeout=BLAME_S)
            self._raise_first(command.__name__, {waiting[call]: call.exception() for call in done})
            if late:
                names = ", ".join(str(rank) for rank in sorted(waiting[call] for call in late))
                raise LearnerLost(
                    f"{command.__name__} took more than {limit_s:g} s (learner.timeout_s) in "
                    f"learner rank {names}"
                )
            return [call.result() for call in waiting]
        finally:
            for call in waiting:
                call.cancel()

    def _raise_first(self, method: str, errors: Mapping[int, BaseException | None]) -> None:
        """Raise for a rank that is gone, or else for the first one that failed."""
        failed = {rank: error for rank, error in sorted(errors.items()) if error is not None}
        gone = {rank: error for rank, error in failed.items() if isinstance(error, RankGone)}
        for rank, error in (gone or failed).items():
            if not isinstance(error, RankFailed):
                raise error
            what = "is gone" if gone else "failed"
            raise LearnerLost(f"learner rank {rank} {what} ({method}): {error}") from error
