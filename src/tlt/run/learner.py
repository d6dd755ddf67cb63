"""The learner on Ray: one actor per rank, and the driver's handle on all of them.

Ranks are started together and lost together: when one dies, the others wait in a collective for
ever, so the driver kills them all and starts anew from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tlt.drafter.buffer import BufferSettings, SampleBuffer
from tlt.drafter.capture import Captured
from tlt.drafter.keeper import StateKeeper
from tlt.errors import LearnerLost
from tlt.hardware import thread_environment
from tlt.learner.batch import TrainSample, rows_by_rank
from tlt.rollout.cores import bind_process, claim_cores
from tlt.rollout.weights import SharedWeights
from tlt.run.cluster import end_actors

if TYPE_CHECKING:
    import torch

    from tlt.learner.rank import RankSettings, UpdateReport

logger = logging.getLogger(__name__)

Rows = list[list[TrainSample]]


@dataclass(frozen=True, slots=True)
class LearnerPlan:
    """What the driver decides about its ranks."""

    num_ranks: int
    row_tokens: int
    rank: RankSettings
    on_gpu: bool
    num_cores: int | None
    core_group: str
    """Ranks that share the engines' cores in turn with them are a group of their own."""
    timeout_s: float
    buffer: BufferSettings | None = None
    """The node's captured states, which checkpoints hold; None where nothing is captured."""
    captures: bool = True
    """Whether the states are those of the update's own pass; otherwise engines fill the buffer."""


class LearnerActor:
    """Runs in a rank's process. One thread trains; checkpoints are waited for in another."""

    def __init__(self, plan: LearnerPlan, rank: int) -> None:
        self._plan = plan
        self._rank_index = rank
        self._rl_step = 0

    def _bind(self, ranks_here: int) -> None:
        """Cores of its own for this rank and all its threads."""
        available = len(os.sched_getaffinity(0))
        wanted = self._plan.num_cores or max(1, available // ranks_here)
        cores = claim_cores(wanted, self._plan.core_group)
        bind_process(cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
        import torch

        torch.set_num_threads(len(cores))

    def address(self) -> tuple[str, str]:
        """Where this rank is, and a free port on it for the ranks to meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        meeting = f"tcp://{ray.util.get_node_ip_address()}:{port}"
        return ray.get_runtime_context().get_node_id(), meeting

    def start(self, meeting: str, restore: str | None, ranks_here: int) -> int:
        """Meet the other ranks, load the policy; this process's id."""
        if not self._plan.on_gpu:
            self._bind(ranks_here)
        import torch
        import torch.distributed as dist

        from tlt.learner.rank import LearnerRank

        dist.init_process_group(
            "nccl" if self._plan.on_gpu else "gloo",
            init_method=meeting,
            rank=self._rank_index,
            world_size=self._plan.num_ranks,
            timeout=timedelta(seconds=self._plan.timeout_s),
        )
        self._keeper = None
        if self._plan.buffer is not None:
            self._keeper = StateKeeper(SampleBuffer(self._plan.buffer))
        device = torch.device("cuda" if self._plan.on_gpu else "cpu")
        keep = self._keep if self._keeper and self._plan.captures else None
        self._rank = LearnerRank(self._plan.rank, device, keep)
        if restore is not None:
            self._rank.restore(Path(restore))
        return os.getpid()

    def accumulate(self, rows: Rows, rl_step: int) -> None:
        self._rl_step = rl_step
        self._rank.accumulate(rows)

    def _keep(self, sample: TrainSample, aux_TA: torch.Tensor, final_TH: torch.Tensor) -> None:
        assert self._keeper is not None
        captured = Captured.of(sample.prompt_ids, sample.response_ids, aux_TA, final_TH)
        self._keeper.keep(sample.sample_id, self._rl_step, captured)

    def remember_logprobs(self, rows: Rows) -> None:
        self._rank.remember_logprobs(rows)

    def step(self, denominator: float, max_gap: float) -> tuple[UpdateReport, int, int]:
        """The update's report; samples captured so far and bytes they take."""
        report = self._rank.step(denominator, max_gap)
        if self._keeper is None:
            return report, 0, 0
        return report, self._keeper.num_kept, self._keeper.buffer.num_bytes()

    def forget_logprobs(self) -> None:
        self._rank.forget_logprobs()

    def publish(self, dtype: str, same_node: bool) -> Any:
        """Rank 0: the whole policy, as a file in shared memory or, for another node, as tensors."""
        import torch

        weights = self._rank.full_weights(getattr(torch, dtype))
        if self._rank_index > 0:
            for _ in weights:
                pass
            return None
        if same_node:
            return str(SharedWeights(weights).path)
        return [(name, tensor.cpu()) for name, tensor in weights]

    def save_policy(self, folder: str, dtype: str) -> None:
        """Rank 0 writes the policy as a Hugging Face folder."""
        import torch
        from safetensors.torch import save_file

        weights = {
            name: tensor.cpu().contiguous()
            for name, tensor in self._rank.full_weights(getattr(torch, dtype))
            if self._rank_index == 0
        }
        if self._rank_index > 0:
            return
        visible, source = Path(folder), Path(self._plan.rank.model)
        out = visible.with_name(f".{visible.name}")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for file in source.iterdir():
            holds_weights = file.suffix in (".safetensors", ".bin", ".gguf")
            if file.is_file() and not holds_weights and not file.name.endswith(".index.json"):
                shutil.copy(file, out / file.name)
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        shutil.rmtree(visible, ignore_errors=True)
        out.rename(visible)

    def save(self, folder: str) -> None:
        self._rank.save(Path(folder))

    def wait_saved(self) -> None:
        self._rank.wait_saved()

    def save_buffer(self, folder: str, earlier: str | None, rl_step: int) -> None:
        if self._keeper is not None:
            self._keeper.drain()
            self._keeper.buffer.copy_to(Path(folder), rl_step, Path(earlier) if earlier else None)

    def restore_buffer(self, folder: str | None) -> None:
        """Exactly what a checkpoint holds; nothing at the beginning of a run."""
        if self._keeper is not None:
            self._keeper.buffer.restore_from(None if folder is None else Path(folder))


class LearnerGroup:
    """All ranks, as the driver sees them. Any failure is a `LearnerLost`."""

    def __init__(
        self,
        plan: LearnerPlan,
        place: Callable[[int], Mapping[str, Any]] = lambda rank: {"num_cpus": 0},
    ) -> None:
        self._plan = plan
        self._place = place
        self._ranks: list[Any] = []
        self._nodes: list[str] = []

    async def start(self, restore: Path | None = None) -> list[int]:
        """Start all ranks, from a checkpoint's folder or from the model; their process ids."""
        actor = ray.remote(concurrency_groups={"io": 2})(LearnerActor)
        for rank in range(self._plan.num_ranks):
            options = dict(self._place(rank))
            environment = thread_environment() | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
            if (gpu := options.pop("gpu", None)) is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpu
            actors = actor.options(
                max_restarts=0,
                runtime_env={"env_vars": environment},
                **options,
            )
            self._ranks.append(actors.remote(self._plan, rank))
        addresses = await self._all("address")
        self._nodes = [node for node, _ in addresses]
        saved = None if restore is None else str(restore / "learner")
        meeting = addresses[0][1]
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
        """End all ranks, and wait until they hold no core or memory any more."""
        ranks, self._ranks = self._ranks, []
        await end_actors(ranks)

    # --- the update ---------------------------------------------------------------------------

    async def accumulate(self, samples: Sequence[TrainSample], rl_step: int) -> None:
        """Add the gradients of these samples."""
        if samples:
            await self._each("accumulate", [(rows, rl_step) for rows in self._rows(samples)])

    async def remember_logprobs(self, samples: Sequence[TrainSample]) -> None:
        await self._each("remember_logprobs", [(rows,) for rows in self._rows(samples)])

    async def forget_logprobs(self) -> None:
        await self._all("forget_logprobs")

    async def step(
        self, denominator: float, max_gap: float = math.inf
    ) -> tuple[UpdateReport, int, int]:
        """Report of the update, and samples and bytes captured on all nodes."""
        reports = await self._all("step", denominator, max_gap)
        first = {node: rank for rank, node in reversed(list(enumerate(self._nodes)))}
        num_bytes = sum(reports[rank][2] for rank in first.values())
        return reports[0][0], sum(kept for _, kept, _ in reports), num_bytes

    def _rows(self, samples: Sequence[TrainSample]) -> list[Rows]:
        return rows_by_rank(samples, self._plan.row_tokens, self._plan.num_ranks)

    # --- weights and checkpoints --------------------------------------------------------------

    async def publish(self, dtype: str) -> SharedWeights | list[tuple[str, torch.Tensor]]:
        """The current policy for the engines."""
        same_node = self._nodes[0] == ray.get_runtime_context().get_node_id()
        weights = (await self._all("publish", dtype, same_node))[0]
        return SharedWeights.adopt(weights) if same_node else weights

    async def save_policy(self, folder: Path, dtype: str) -> None:
        await self._all("save_policy", str(folder), dtype)

    async def save(self, folder: Path) -> None:
        """Take a copy of the state; `wait_saved` ends when it is on disk."""
        await self._all("save", str(folder / "learner"))

    async def wait_saved(self, folder: Path, earlier: Path | None, rl_step: int) -> None:
        """Ends when the state is on disk, with the captured samples that go with it."""
        await self._all("wait_saved", group="io")
        if self._plan.buffer is not None:
            await self._on_nodes(
                "save_buffer",
                lambda node: (
                    str(folder / f"buffer-{node}"),
                    str(earlier / f"buffer-{node}") if earlier else None,
                    rl_step,
                ),
            )

    # --- calls --------------------------------------------------------------------------------

    async def _all(self, method: str, *args: Any, group: str | None = None) -> list[Any]:
        return await self._each(method, [args] * len(self._ranks), group)

    async def _on_nodes(self, method: str, args: Callable[[int], tuple[Any, ...]]) -> None:
        """Call the first rank of every node."""
        calls = []
        for number, node in enumerate(dict.fromkeys(self._nodes)):
            rank = self._ranks[self._nodes.index(node)]
            calls.append(
                getattr(rank, method).options(concurrency_group="io").remote(*args(number))
            )
        await self._gather(method, calls)

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
