"""The memory plan of a run: what lies where at the same time, and whether it fits. Pure.

Sizes of tensors follow from the model's shapes; `tlt.learner.memory` has the learner's. What a
device needs besides tensors is assumed, by the constants below. Places are one GPU in the stages of
an RL step, and the host memory of one node, the fullest one. `tlt.train.fit` refuses what is too
large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig
from tlt.drafter.eagle3.config import Eagle3Config, harvest_draft_vocabulary
from tlt.hardware import Machine
from tlt.harvest.leases import moved_bytes
from tlt.learner.memory import LearnerMemory, ModelShape, learner_memory
from tlt.vllm.args import max_draft_tokens

GIB = 2**30
BFLOAT16, FLOAT32 = 2, 4
CONTEXT_BYTES = GIB
"""CUDA context and communication buffers of one process on a GPU: assumed."""
ASLEEP_BYTES = 2 * GIB
"""Memory that a sleeping engine keeps on each GPU, context and graphs: assumed."""
GRAPH_BYTES = GIB
"""CUDA graphs of an engine on one GPU: assumed."""
PROCESS_BYTES = 3 * GIB
"""Host memory of a process that uses a GPU, besides its tensors: assumed."""
CPU_PROCESS_BYTES = GIB
"""The same of a process without a GPU: assumed."""
FRAGMENTED = 0.05
"""Share of the learner's tensors that its allocator needs on top: assumed."""
UTILIZATION = 0.92
"""vLLM's own `gpu_memory_utilization`."""
BATCHED_TOKENS, MAX_SEQS = 16384, 1024
"""vLLM's own `max_num_batched_tokens` and `max_num_seqs` on large GPUs."""
HISTORY_BYTES = 70
"""Bytes of a token in an engine's n-gram history."""
TRAINER_COPIES = 6
"""Float32 tensors of the drafter's size in a trainer: weights, gradients, two moments, the mean,
and the weights that the training began with."""

Part = tuple[str, int]
"""Name and bytes of something in memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """One memory at one time, and what lies in it."""

    name: str
    capacity: int | None
    """Bytes; None if the machine is not known."""
    parts: tuple[Part, ...]
    note: str = ""

    @property
    def need(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.need <= self.capacity

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: part[1])[0]


class Sizes:
    """The sizes that the plan of one run is made from."""

    def __init__(
        self,
        config: TrainConfig,
        engine: EngineConfig,
        model: Mapping[str, Any],
        machine: Machine,
        longest_sample: int,
    ) -> None:
        self.config, self.engine, self.machine = config, engine, machine
        self.shape = ModelShape.of(model)
        self.longest_sample = longest_sample
        self.c = BFLOAT16 if config.policy.dtype == "bfloat16" else FLOAT32
        self.on_gpu = engine.num_gpus > 0
        self.colocated = config.placement.kind == "colocated"
        self.weights = self.c * self.shape.parameters
        self.drafts = engine.drafter is not None or config.tlt.harvests
        vocab = config.tlt.draft_vocab_size or harvest_draft_vocabulary(
            self.shape.vocab, self.on_gpu
        )
        vocab = min(vocab, self.shape.vocab)
        self.drafter_parameters = _drafter_parameters(self.shape, vocab) if self.drafts else 0
        self.draft_vocab = vocab
        args = engine.engine_args
        self.utilization = float(args.get("gpu_memory_utilization", UTILIZATION))
        limit = args.get("max_model_len") or model.get("max_position_embeddings")
        self.max_model_len = int(limit or longest_sample)

    def learner(self, **changes: Any) -> LearnerMemory:
        """Return a rank's memory, or what it would be with other settings."""
        config = self.config
        given: dict[str, Any] = {
            "row_tokens": max(config.learner.row_tokens, self.longest_sample),
            "num_ranks": config.learner.num_ranks,
            "gradient_checkpointing": config.learner.gradient_checkpointing,
        }
        return learner_memory(
            self.shape,
            dtype="bfloat16" if self.c == BFLOAT16 else "float32",
            attention_kernel=bool(config.learner.num_gpus) and self.c == BFLOAT16,
            reference=config.algorithm.kl_weight > 0,
            captures=config.capture.enabled and config.capture.by != "engines",
            **given | changes,
        )

    # --- one GPU ------------------------------------------------------------------------------

    def kv_token_bytes(self) -> int:
        """Return the KV cache of one token on one GPU, with the drafter's layer."""
        layers = self.shape.layers + self.drafts
        return self.shape.kv_bytes(self.c) * layers // self.shape.layers // self.engine.num_gpus

    def engine_parts(self, capacity: int, utilization: float) -> tuple[Part, ...]:
        """Return the parts of an engine's share of a GPU; the KV cache is the rest."""
        gpus, shape, args = self.engine.num_gpus, self.shape, self.engine.engine_args
        tokens = int(args.get("max_num_batched_tokens", BATCHED_TOKENS))
        rows = int(args.get("max_num_seqs", MAX_SEQS)) * (max_draft_tokens(self.engine) + 1)
        working = self.c * tokens * (3 * shape.intermediate // gpus + 4 * shape.hidden)
        working += 2 * FLOAT32 * rows * shape.vocab // gpus + GRAPH_BYTES + CONTEXT_BYTES
        parts = [
            ("policy", self.weights // gpus),
            ("engine's working memory", working),
        ]
        if self.drafts:
            # With its own copy of the policy's embedding.
            own = self.drafter_parameters + shape.vocab * shape.hidden
            parts.append(("drafter", self.c * own // gpus))
            # Every tensor-parallel rank has all hidden states.
            parts.append(("drafter's catch-up", self.engine.drafter_state_mib * 2**20))
        cache = int(utilization * capacity) - sum(size for _, size in parts)
        return (*parts, ("KV cache", max(0, cache)))

    def beside(self, **changes: Any) -> tuple[Part, ...]:
        """Return what lies on a GPU beside an engine at work, or would with other settings."""
        if not self.colocated:
            return ()
        trainer = (("drafter's trainer: context", CONTEXT_BYTES),) * self.config.tlt.harvests
        return (("learner at rest", self.learner(**changes).resting + CONTEXT_BYTES), *trainer)

    def update_parts(self, learner: LearnerMemory) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = (
            ("learner", learner.peak),
            ("learner: context, fragmentation", CONTEXT_BYTES + int(FRAGMENTED * learner.peak)),
        )
        if self.colocated:
            parts += (("sleeping engine", ASLEEP_BYTES),)
            parts += (("drafter's trainer: context", CONTEXT_BYTES),) * self.config.tlt.harvests
        return parts

    def harvest_parts(self) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = (
            ("drafter's trainer", self.trainer_bytes() + CONTEXT_BYTES),
            ("sleeping engine", ASLEEP_BYTES),
        )
        if self.colocated:
            parts += (("learner at rest", self.learner().resting + CONTEXT_BYTES),)
        return parts

    def trainer_bytes(self) -> int:
        """Return the memory of a trainer at work."""
        tlt, shape = self.config.tlt, self.shape
        ends = BFLOAT16 * shape.hidden * (2 * shape.vocab + self.draft_vocab)
        passes = tlt.row_tokens * tlt.num_draft_tokens
        work = FLOAT32 * passes * (3 * self.draft_vocab + 20 * shape.hidden)
        return TRAINER_COPIES * FLOAT32 * self.drafter_parameters + ends + work

    # --- one node -----------------------------------------------------------------------------

    def nodes(self) -> list[tuple[int, int]]:
        """Return the engines and ranks of the nodes that may be the fullest."""
        gpus, config = self.machine.num_gpus, self.config
        engines, ranks = config.pool.num_engines, config.learner.num_ranks
        if gpus is None:
            return [(engines, ranks)]
        most_engines = min(engines, max(1, gpus // self.engine.num_gpus))
        most_ranks = min(ranks, gpus)
        if self.colocated or engines * self.engine.num_gpus + ranks <= gpus:
            return [(most_engines, most_ranks)]
        return [(most_engines, 0), (0, most_ranks)]


def memory_plan(sizes: Sizes) -> list[Place]:
    """Return every place of the run with its parts."""
    if not sizes.on_gpu:
        return [_cpu_host(sizes)]
    places = [_generating(sizes)]
    if sizes.config.tlt.harvests:
        places.append(Place("a GPU, harvest", sizes.machine.gpu_bytes, sizes.harvest_parts()))
    if sizes.config.learner.num_gpus:
        learner = sizes.learner()
        parts = sizes.update_parts(learner)
        note = f"peak in {learner.moment}"
        places.append(Place("a GPU, update", sizes.machine.gpu_bytes, parts, note))
    hosts = [_gpu_hosts(sizes, engines, ranks) for engines, ranks in sizes.nodes()]
    fullest = [max(same, key=lambda place: place.need) for same in zip(*hosts, strict=True)]
    return [*places, *fullest]


def _generating(sizes: Sizes) -> Place:
    capacity = sizes.machine.gpu_bytes
    parts = sizes.engine_parts(capacity or 0, sizes.utilization)
    note = f"engine.engine_args.gpu_memory_utilization = {sizes.utilization:g}"
    if capacity is not None:
        tokens = parts[-1][1] // sizes.kv_token_bytes()
        note = f"KV cache of {tokens:,} tokens, {tokens / sizes.max_model_len:.1f} samples at once"
    return Place("a GPU, generating", capacity, (*parts, *sizes.beside()), note)


def _gpu_hosts(sizes: Sizes, engines: int, ranks: int) -> list[Place]:
    config, shape, capacity = sizes.config, sizes.shape, sizes.machine.host_bytes
    harvests = config.tlt.harvests
    # Engines keep their policy on the host while the learner starts, and while a trainer has their
    # GPU. Other engines drop it before an update.
    asleep = (("weights of sleeping engines", engines * sizes.weights),)
    num_processes = engines * (1 + harvests) + ranks
    processes = (("processes", num_processes * PROCESS_BYTES),)
    loading = (("ranks load the policy in float32", ranks * FLOAT32 * shape.parameters),)
    saved = 12 * shape.parameters * ranks // config.learner.num_ranks
    running: list[Part] = [
        ("checkpoint on its way to disk", saved),
        ("new policy in shared memory", 2 * sizes.weights),
        *asleep * harvests,
        *processes,
    ]
    if config.capture.enabled:
        running.append(("captured states", int(config.capture.capacity_gib * GIB)))
    if harvests:
        # Pinned memory comes in powers of two: up to twice the size.
        parked = 2 * moved_bytes(sizes.drafter_parameters, averaged=True)
        ends = 2 * BFLOAT16 * shape.vocab * shape.hidden
        running.append(("trainers between leases", engines * (parked + ends)))
    return [
        Place("host, start", capacity, (*loading, *asleep * sizes.colocated, *processes)),
        Place("host, running", capacity, tuple(running)),
    ]


def _cpu_host(sizes: Sizes) -> Place:
    config, engine = sizes.config, sizes.engine
    engines, ranks = config.pool.num_engines, config.learner.num_ranks
    history = engine.ngram.history_tokens * HISTORY_BYTES if engine.ngram is not None else 0
    own = sizes.weights + sizes.c * sizes.drafter_parameters + int(engine.kv_cache_gib * GIB)
    own += engine.drafter_state_mib * 2**20 * sizes.drafts
    parts = [
        ("engines", engines * (own + history)),
        ("learner", ranks * sizes.learner().peak),
        ("new policy in shared memory", 2 * sizes.weights),
        ("processes", (engines * (1 + config.tlt.harvests) + ranks) * CPU_PROCESS_BYTES),
    ]
    if config.tlt.harvests:
        trainers = min(engines, config.tlt.max_trainers)
        parts.append(("drafter's trainers", trainers * sizes.trainer_bytes()))
    if config.capture.enabled:
        parts.append(("captured states", int(config.capture.capacity_gib * GIB)))
    return Place("host", sizes.machine.host_bytes, tuple(parts))


def _drafter_parameters(shape: ModelShape, draft_vocab: int) -> int:
    config = Eagle3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.vocab, draft_vocab_size=draft_vocab,
        aux_layer_ids=(0, 1, 2), rope_theta=1e4, rms_norm_eps=1e-6, max_position_embeddings=1,
    )  # fmt: skip
    return config.num_parameters
