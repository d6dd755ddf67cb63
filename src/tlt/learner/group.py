"""The driver's handle on all ranks of the learner.

Ranks start together and are lost together. When one rank dies, the others wait in a collective for
ever, so the driver kills them all and starts them again from the last checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tlt.errors import CheckpointFailed, LearnerLost
from tlt.hardware import thread_environment
from tlt.learner.actor import LearnerActor, LearnerPlan, Rows
from tlt.learner.batch import TrainSample, rows_by_rank
from tlt.node.cluster import end_actors
from tlt.node.shared import run_environment
from tlt.node.weights import SharedWeights
from tlt.states.writer import Stored

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport


class LearnerGroup:
    """All ranks, as the driver sees them; any failure raises `LearnerLost`."""

    def __init__(
        self,
        plan: LearnerPlan,
        place: Callable[[int], Mapping[str, Any]] = lambda rank: {"num_cpus": 0},
    ) -> None:
        self._plan = plan
        self._place = place
        self._ranks: list[Any] = []
        self._nodes: list[str] = []
        self._connected: Any = None
        """Engines that the ranks are connected with, to send the policy from GPU to GPU."""

    async def start(self, restore: Path | None = None) -> list[int]:
        """Start all ranks from a checkpoint or from the model, and return their process ids."""
        actor = ray.remote(concurrency_groups={"io": 2})(LearnerActor)
        for rank in range(self._plan.num_ranks):
            options = dict(self._place(rank))
            environment = thread_environment() | run_environment()
            environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
            if (gpu := options.pop("gpu", None)) is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpu
            actors = actor.options(
                max_restarts=0,
                runtime_env={"env_vars": environment},
                **options,
            )
            self._ranks.append(actors.remote(self._plan, rank))
        self._nodes = await self._all("node")
        saved = None if restore is None else str(restore / "learner")
        on_one_node = len(set(self._nodes)) == 1
        (meeting,) = await self._gather("meeting", [self._ranks[0].meeting.remote(on_one_node)])
        pids: list[int] = await self._each(
            "start", [(meeting, saved, self._nodes.count(node)) for node in self._nodes]
        )
        if self._plan.buffer is not None:
            await self._on_nodes(
                "restore_buffer",
                lambda node: (str(restore / f"buffer-{node}") if restore else None,),
            )
        return pids

    async def stop(self) -> None:
        """End all ranks and wait until they hold no core and no memory."""
        self._connected = None
        ranks, self._ranks = self._ranks, []
        await end_actors(ranks)

    # --- the update ---------------------------------------------------------------------------

    async def accumulate(self, samples: Sequence[TrainSample], rl_step: int) -> None:
        """Add the gradients of these samples."""
        if samples:
            await self._each("accumulate", [(rows, rl_step) for rows in self._rows(samples)])

    async def remember_logprobs(self, samples: Sequence[TrainSample]) -> None:
        """Keep the log-probabilities of one optimizer step's samples, before the first one."""
        await self._each("remember_logprobs", [(rows,) for rows in self._rows(samples)])

    async def forget_logprobs(self) -> None:
        await self._all("forget_logprobs")

    async def step(self, denominator: float, max_gap: float) -> tuple[UpdateReport, Stored]:
        """Make an optimizer step of the added gradients.

        Return its report, and what became of the samples captured on all nodes.
        """
        answers = await self._all("step", denominator, max_gap)
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
        same_node = self._nodes[0] == ray.get_runtime_context().get_node_id()
        return await self._adopt((await self._all("publish", dtype, same_node))[0])

    async def send(
        self, route: Any, dtype: str, version: int, keep: Sequence[str]
    ) -> SharedWeights:
        """Send the policy to the engines of a route, and return the tensors named in `keep`."""
        connected, self._connected = self._connected, None  # a connection that fails is lost
        if route.engines != connected:
            await self._all("connect", route, dtype)
        same_node = self._nodes[0] == ray.get_runtime_context().get_node_id()
        kept = (await self._all("send", version, tuple(keep), same_node))[0]
        self._connected = route.engines
        return await self._adopt(kept)

    async def free_cache(self) -> None:
        """Give the memory that ranks keep for later back to the devices' other processes."""
        await self._all("free_cache")

    async def _adopt(self, weights: Any) -> SharedWeights:
        if isinstance(weights, str):
            try:
                return SharedWeights.adopt(weights)
            except FileNotFoundError:  # the rank has died meanwhile
                raise LearnerLost("a learner rank is gone, and its weights with it") from None
        return await asyncio.to_thread(SharedWeights.of_bytes, weights)

    async def save_policy(self, folder: Path, dtype: str) -> None:
        await self._all("save_policy", str(folder), dtype)

    async def save(self, folder: Path) -> None:
        """Copy the learner's state; `wait_saved` returns when the copy is on disk."""
        await self._all("save", str(folder / "learner"))

    async def wait_saved(self, folder: Path, earlier: Path | None, rl_step: int) -> None:
        """Wait until the state is on disk, and add the samples captured up to this RL step."""
        faults = await self._all("wait_saved", group="io")
        if self._plan.buffer is not None:
            faults += await self._on_nodes(
                "save_buffer",
                lambda node: (
                    str(folder / f"buffer-{node}"),
                    str(earlier / f"buffer-{node}") if earlier else None,
                    rl_step,
                ),
            )
        if any(faults):
            raise CheckpointFailed(next(fault for fault in faults if fault))

    # --- calls --------------------------------------------------------------------------------

    async def _all(self, method: str, *args: Any, group: str | None = None) -> list[Any]:
        return await self._each(method, [args] * len(self._ranks), group)

    async def _on_nodes(self, method: str, args: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Call the first rank of every node."""
        calls = []
        for number, node in enumerate(dict.fromkeys(self._nodes)):
            rank = self._ranks[self._nodes.index(node)]
            calls.append(
                getattr(rank, method).options(concurrency_group="io").remote(*args(number))
            )
        return await self._gather(method, calls)

    async def _each(
        self, method: str, args: Sequence[tuple[Any, ...]], group: str | None = None
    ) -> list[Any]:
        options = {"concurrency_group": group} if group else {}
        calls = [
            getattr(rank, method).options(**options).remote(*own)
            for rank, own in zip(self._ranks, args, strict=True)
        ]
        return await self._gather(method, calls)

    async def _gather(self, method: str, calls: Sequence[Any]) -> list[Any]:
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                return await asyncio.gather(*calls)
        except ray.exceptions.RayTaskError as error:
            raise LearnerLost(f"{method} failed in a learner rank: {error}") from error
        except ray.exceptions.RayError as error:
            raise LearnerLost(f"a learner rank is gone ({method}): {error}") from error
        except TimeoutError:
            raise LearnerLost(
                f"{method} took more than {self._plan.timeout_s:.0f} s (learner.timeout_s)"
            ) from None
