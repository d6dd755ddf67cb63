"""The Ray actor of one learner rank, and the driver's handle on it.

A rank is a process that holds a shard of the policy. `tlt.learner.group` drives all ranks;
`tlt.learner.rank` does the training.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray

from tlt.config.train import TrainConfig
from tlt.hardware import thread_environment
from tlt.learner.batch import WAITING_ROWS, TrainSample, Weighting
from tlt.learner.calls import InOrder, RankFailed, RankGone
from tlt.logs import LogSettings, log_to_file
from tlt.node.cluster import end_actors, end_with_ray, this_node
from tlt.node.cores import bind_process, claim_cores
from tlt.node.shared import SharedFolder, run_environment
from tlt.node.weights import SharedWeights, file_bytes
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.writer import StateWriter, Stored
from tlt.user_code import import_from

if TYPE_CHECKING:
    import torch

    from tlt.learner.policy import PackedRow
    from tlt.learner.rank import RankSettings, UpdateReport

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Rows = list[list[TrainSample]]


@dataclass(frozen=True, slots=True)
class LearnerPlan:
    """The driver's decisions about the learner's ranks."""

    num_ranks: int
    row_tokens: int
    rank: RankSettings
    on_gpu: bool
    num_cores: int | None
    core_group: str
    """Name under which ranks claim cores; colocated ranks have a name besides the engines'."""
    timeout_s: float
    buffer: BufferSettings | None
    """The node's buffer of captured states, part of every checkpoint; None where none are kept."""
    captures: bool
    """Whether ranks fill the buffer from the update's own passes; otherwise engines fill it."""
    log: LogSettings | None = None
    """Log settings of the ranks; None leaves logging unchanged."""

    @classmethod
    def of_run(
        cls, config: TrainConfig, captured_layers: tuple[int, ...], log: LogSettings | None
    ) -> LearnerPlan:
        """Return the plan of a run whose ranks capture the states of these layers, if any."""
        from tlt.learner.rank import RankSettings

        algorithm, learner = config.algorithm, config.learner
        colocated = config.placement.kind == "colocated"
        return cls(
            num_ranks=learner.num_ranks,
            row_tokens=learner.row_tokens,
            rank=RankSettings(
                model=config.policy.model,
                dtype=config.policy.dtype,
                temperature=config.sampling.temperature,
                weighting=Weighting(algorithm.mean_over, config.sampling.max_tokens),
                algorithm=algorithm,
                learner=learner,
                aux_layer_ids=captured_layers,
                seed=config.run.seed,
            ),
            on_gpu=bool(learner.num_gpus),
            num_cores=learner.num_cores or (None if colocated else 1),
            core_group=config.debug.core_group + ("-learner" if colocated else ""),
            timeout_s=learner.timeout_s,
            buffer=BufferSettings.of_run(config.capture) if config.capture.enabled else None,
            captures=config.capture.by != "engines",
            log=log,
        )


class LearnerActor:
    """Runs in a rank's process: one thread trains, another one waits for checkpoints."""

    def __init__(self, plan: LearnerPlan, rank: int, code_folder: str | None = None) -> None:
        if code_folder is not None:
            import_from(Path(code_folder))  # may hold the module of a user's loss
        self._plan = plan
        self._rank_index = rank
        self._calls = InOrder()
        self._rl_step = 0
        self._sender: Any = None
        """Sends the policy to engines on GPUs, once connected."""
        self._handed_over: SharedWeights | None = None
        """The last file for the driver, held by this process at least until the driver has it."""
        self._meeting: SharedFolder | None = None
        """Folder of the file through which the ranks of one node meet."""

    def do(self, number: int, method: str, *args: Any) -> Any:
        """Call a method that may change the policy: each call once, in the driver's order."""
        self._calls.check(number, method)
        try:
            return getattr(self, method)(*args)
        except Exception:
            logger.exception("%s failed", method)
            raise

    def _bind(self, ranks_here: int) -> None:
        """Claim cores for this rank and all its threads."""
        available = len(os.sched_getaffinity(0))
        wanted = self._plan.num_cores or max(1, available // ranks_here)
        cores = claim_cores(wanted, self._plan.core_group)
        bind_process(cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
        import torch

        torch.set_num_threads(len(cores))
        # The gradient of an index adds up rows in the order in which threads reach them, unless
        # torch must be deterministic. Then the same samples make the same update, bit for bit.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a check that costs time

    def node(self) -> str:
        """Return this rank's node."""
        return this_node()

    def meeting(self, on_one_node: bool) -> str:
        """Return where the ranks meet: a private file, or a free port for those of other nodes.

        Any process that reaches the port could take part.
        """
        if on_one_node:
            self._meeting = SharedFolder.make("meeting")
            return f"file://{self._meeting.path / 'ranks'}"
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{ray.util.get_node_ip_address()}:{port}"

    def start(self, meeting: str, restore: str | None, ranks_here: int) -> int:
        """Meet the other ranks, load the policy, and return this process's id."""
        end_with_ray()
        if (log := self._plan.log) is not None:
            log_to_file(log.folder, f"rank-{self._rank_index}", log.level)
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
        self._writer = None
        if self._plan.buffer is not None:
            self._writer = StateWriter(SampleBuffer(self._plan.buffer), WAITING_ROWS)
        device = torch.device("cuda" if self._plan.on_gpu else "cpu")
        keep = self._keep if self._writer and self._plan.captures else None
        self._rank = LearnerRank(self._plan.rank, device, keep)
        if restore is not None:
            self._rank.restore(Path(restore))
        source = restore or self._plan.rank.model
        logger.info("the policy of %s is loaded, process %d", source, os.getpid())
        return os.getpid()

    def accumulate(self, rows: Rows, rl_step: int) -> None:
        self._rl_step = rl_step
        self._rank.accumulate(rows)

    def _keep(self, row: PackedRow, aux_TA: torch.Tensor, final_TH: torch.Tensor) -> None:
        assert self._writer is not None
        texts = [(s.sample_id, s.prompt_ids, s.response_ids) for s in row.samples]
        self._writer.write_row(self._rl_step, texts, row.unshare_E, aux_TA, final_TH)

    def remember_logprobs(self, rows: Rows) -> None:
        self._rank.remember_logprobs(rows)

    def step(self, denominator: float, max_gap: float) -> tuple[UpdateReport, Stored]:
        """Return the update's report, and the counts of captured samples so far."""
        report = self._rank.step(denominator, max_gap)
        return report, Stored() if self._writer is None else self._writer.stored()

    def forget_logprobs(self) -> None:
        self._rank.forget_logprobs()

    def publish(self, dtype: str, same_node: bool) -> Any:
        """Return the whole policy from rank 0: a file in shared memory, or its bytes.

        All ranks must take part. Afterwards each one frees the memory that it no longer uses.
        """
        import torch

        weights = self._rank.full_weights(getattr(torch, dtype))
        found = None
        if self._rank_index > 0:
            for _ in weights:
                pass
        else:
            found = self._hand_over(weights, same_node)
        self.free_cache()
        return found

    def free_cache(self) -> None:
        """Give the memory that torch keeps for later back to the device's other processes."""
        if self._plan.on_gpu:
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def connect(self, route: Any, dtype: str) -> None:
        """Connect this rank with engines, to send them the policy from GPU to GPU."""
        import torch

        if self._sender is not None:
            self._sender.close()
        rank, wire = self._rank, getattr(torch, dtype)
        host = ray.util.get_node_ip_address()
        self._sender = route.open(
            self._rank_index,
            host,
            rank.shapes(),
            wire,
            lambda: rank.full_weights(wire),
        )

    def send(self, version: int, keep: tuple[str, ...], same_node: bool) -> Any:
        """Send the policy to the connected engines; rank 0 returns the tensors named in `keep`.

        All ranks must take part.
        """
        assert self._sender is not None
        kept = self._sender.send(version, keep)
        self.free_cache()
        return self._hand_over(kept, same_node) if self._rank_index == 0 else None

    def _hand_over(self, weights: Iterable[tuple[str, torch.Tensor]], same_node: bool) -> Any:
        """Write weights for the driver: return the file on its node, or the bytes elsewhere."""
        shared = SharedWeights(weights)
        if same_node:
            self._handed_over = shared
            return str(shared.path)
        with shared:
            return file_bytes(str(shared.path))

    def save_policy(self, folder: str, dtype: str) -> None:
        """Write the policy as a Hugging Face folder, from rank 0; all ranks must take part."""
        import torch

        from tlt.learner.export import write_policy

        weights = {
            name: tensor.cpu().contiguous()
            for name, tensor in self._rank.full_weights(getattr(torch, dtype))
            if self._rank_index == 0
        }
        adapter, settings = self._rank.adapter(), self._plan.rank
        if self._rank_index == 0:
            lora = settings.learner.lora
            write_policy(weights, Path(settings.model), Path(folder), dtype, adapter, lora)

    def save(self, folder: str) -> None:
        self._rank.save(Path(folder))

    # A rank that cannot write a checkpoint is healthy: it answers with the reason.

    def wait_saved(self) -> str:
        """Return when the state is on disk, with nothing, or with the reason why it is not."""
        try:
            self._rank.wait_saved()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def save_buffer(self, folder: str, earlier: str | None, rl_step: int) -> str:
        """Write the captured samples; return an empty text, or the reason why they were not
        written."""
        if self._writer is not None:
            self._writer.drain()
            before = Path(earlier) if earlier else None
            try:
                self._writer.buffer.copy_to(Path(folder), rl_step, before)
            except OSError as error:
                return str(error)
        return ""

    def restore_buffer(self, folder: str | None) -> None:
        """Make the buffer hold exactly what the checkpoint holds; None empties it."""
        if self._writer is not None:
            self._writer.buffer.restore_from(None if folder is None else Path(folder))


class RayRank:
    """The driver's handle on a rank. A call that fails raises `RankFailed`."""

    def __init__(self, plan: LearnerPlan, rank: int, options: Mapping[str, Any]) -> None:
        options = dict(options)
        environment = thread_environment() | run_environment()
        environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        if (gpu := options.pop("gpu", None)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        actor = ray.remote(concurrency_groups={"io": 2})(LearnerActor)
        self._actor = actor.options(
            max_restarts=0, runtime_env={"env_vars": environment}, **options
        ).remote(plan, rank, str(Path.cwd()))
        self._number = 0

    async def call(self, command: Callable[[LearnerActor, *Ts], T], *args: *Ts) -> T:
        """Give a command to the thread that trains."""
        self._number += 1
        return await self._answer(self._actor.do.remote(self._number, command.__name__, *args))

    async def call_beside(self, command: Callable[[LearnerActor, *Ts], T], *args: *Ts) -> T:
        """Run a command that waits for files, in parallel to training."""
        beside = getattr(self._actor, command.__name__).options(concurrency_group="io")
        return await self._answer(beside.remote(*args))

    async def kill(self) -> None:
        """Return when the process holds no core and no memory."""
        await end_actors([self._actor])

    async def _answer(self, call: Any) -> Any:
        try:
            return await call
        except ray.exceptions.RayTaskError as error:
            raise RankFailed(str(error)) from error
        except ray.exceptions.RayError as error:
            raise RankGone(str(error)) from error
