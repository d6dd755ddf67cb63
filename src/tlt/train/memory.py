"""The memory plan of a run: what lies where at the same time. Pure.

Sizes of tensors follow from the model's shapes. What a device needs besides tensors is assumed, by
the constants below. Places are one GPU in the stages of an RL step, and the host memory of one
node, the fullest one. `tlt.train.fit` refuses what is too large.

`learner_memory` follows the tensors that `tlt.learner.rank` holds in three moments of an
update's later rows, when gradients and optimizer moments are there: the backward pass of the head,
of a layer, and the reduction of the gradients of embedding and head. The peak is the largest of the
three. With LoRA no gradient of embedding and head is there; they are gathered instead.
`benchmarks/learner_memory.py` counts the same bytes with torch's memory tracker, and a test keeps
formula and tracker together. Models of the Llama and Qwen type only, dense or with experts in every
layer. All experts count as weights; a token's activations are those of the experts that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt.config.train import LoraConfig, TrainConfig
from tlt.drafter.eagle3.config import Eagle3Config, harvest_draft_vocabulary
from tlt.hardware import Dtype, Machine
from tlt.harvest.leases import moved_bytes
from tlt.learner.batch import HEAD_CHUNK_TOKENS, WAITING_ROWS
from tlt.strategy.spec import trained_draft_tokens
from tlt.train.shape import ModelShape
from tlt.vllm.args import RECORDED_CACHES, WAITING_STEPS

GIB = 2**30
BFLOAT16, FLOAT32 = 2, 4
STATE_BYTES, RESTING_BYTES = 16, 12
"""Bytes of a parameter in its rank: float32 weight, gradient and two moments; between updates,
without its gradient."""
STATES = 4
"""Captured states of a token: three fused ones and the final one."""
LOGITS = 3
"""Float32 tensors of the size of the logits in the backward pass of the head."""
ROUTE_BYTES = 32
"""Bytes of a token's way to one expert: its place before and after sorting, expert and weight."""
CONTEXT_BYTES = GRAPH_BYTES = GIB
"""CUDA context and communication buffers of one process; CUDA graphs of an engine: assumed."""
ASLEEP_BYTES = 2 * GIB
"""Memory that a sleeping engine keeps on each GPU, context and graphs: assumed."""
PROCESS_BYTES, CPU_PROCESS_BYTES = 3 * GIB, GIB
"""Host memory of a process with and without a GPU, besides its tensors: assumed."""
FRAGMENTED = 0.05
"""Share of the learner's tensors that its allocator needs on top: assumed."""
UTILIZATION, BATCHED_TOKENS, MAX_SEQS = 0.92, 16384, 1024
"""vLLM's own `gpu_memory_utilization`, `max_num_batched_tokens`, `max_num_seqs` on large GPUs."""
HISTORY_BYTES = 70
"""Bytes of a token in an engine's n-gram history."""
TRAINER_COPIES = 6
"""Float32 tensors of the drafter's size in a trainer: weights, gradients, two moments, the mean,
and the weights that the training began with."""

NO_LORA = LoraConfig()
RECORDED = "hidden states of running samples"

Part = tuple[str, int]
"""Name and bytes of something in memory."""


class LearnerMemory(NamedTuple):
    """Bytes of one rank between updates and at the peak of one, and the moment of the peak."""

    resting: int
    peak: int
    moment: str


def learner_memory(
    shape: ModelShape,
    *,
    row_tokens: int,
    num_ranks: int,
    dtype: Dtype,
    gradient_checkpointing: bool,
    attention_kernel: bool,
    reference: bool = False,
    captures: bool = False,
    lora: LoraConfig = NO_LORA,
) -> LearnerMemory:
    """Return the memory of a rank whose largest row has `row_tokens`, all of them learned.

    `attention_kernel`: attention by `varlen_attn`. `reference`: a copy of the first policy for the
    KL divergence, which LoRA does without. `captures`: the rank captures hidden states.
    """
    c = BFLOAT16 if dtype == "bfloat16" else FLOAT32
    tokens, hidden = row_tokens, shape.hidden
    layer, ends, head = shape.layer_parameters, shape.end_parameters, shape.vocab * hidden
    full, trained = not lora.rank, shape.trained(lora)
    adapter, features = shape.adapter(lora)
    layer += adapter
    frozen = 0 if full else c * shape.parameters
    resting = (RESTING_BYTES * trained + frozen) // num_ranks
    always = (STATE_BYTES * trained + frozen) // num_ranks + c * ends
    if reference and full:
        own = FLOAT32 * shape.parameters // num_ranks
        resting, always = resting + own, always + own + c * ends
    if captures:
        always += STATES * BFLOAT16 * tokens * hidden
    # A layer saves for its backward pass: the two norms' inputs in float32, their two outputs each,
    # the four of the MLP, and those of attention, whose loop repeats keys and values for each head.
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    saved = 2 * FLOAT32 * hidden + c * 4 * (hidden + shape.width)
    if shape.experts:
        # Each expert has its own copy of a token's input and of its output. Routes are float32.
        saved += shape.active * (2 * c * hidden + ROUTE_BYTES) + FLOAT32 * shape.experts
    saved += c * (2 * (queries + keys) if attention_kernel else 5 * queries)
    saved += (FLOAT32 + c) * (queries + keys) * shape.qk_norm
    if not full:
        saved += c * (features - 2 * hidden)  # frozen norms save no output
    saved *= tokens
    inputs = c * tokens * hidden  # of a layer
    kept = shape.layers * (inputs if gradient_checkpointing else saved)
    chunk = LOGITS * FLOAT32 * min(HEAD_CHUNK_TOKENS, tokens) * shape.vocab
    in_head = c * (full * head + layer) + chunk + kept
    in_head += tokens * hidden * (FLOAT32 + (3 + 2 * full) * c // 2)
    in_mlp = c * (full * shape.stack_parameters + 2 * tokens * shape.width)
    if shape.experts:  # or before, when the gradients of their outputs are sorted
        in_mlp = max(in_mlp, 3 * c * tokens * shape.active * hidden)
    # One layer is gathered ahead.
    in_layer = c * (2 * layer + full * head) + kept + in_mlp + (2 - full) * inputs
    if gradient_checkpointing:
        # In the last layer but one: the last one's gradients are on their way to the other ranks.
        in_layer += saved - inputs + full * FLOAT32 * layer
    # Embedding and head themselves are freed by then; their gradients take their place.
    at_end = FLOAT32 * ends if full else c * (ends + 2 * layer)
    moments = {
        "the head's backward pass": in_head,
        "a layer's backward pass": in_layer,
        "the gradients of embedding and head" if full else "gathering the embedding": at_end,
    }
    moment = max(moments, key=lambda name: moments[name])
    return LearnerMemory(resting, always + moments[moment], moment)


@dataclass(frozen=True, slots=True)
class Place:
    """One memory at one time, and its content."""

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


class Sizes:
    """The sizes that the plan of one run is made from."""

    def __init__(
        self,
        config: TrainConfig,
        model: Mapping[str, Any],
        machine: Machine,
        prompt_tokens: int,
        draft_tokens: int,
    ) -> None:
        """Take a model's config.json, the longest prompt, and the longest draft of an engine."""
        self._given = model, machine, prompt_tokens, draft_tokens
        self.config, self.machine, self.draft_tokens = config, machine, draft_tokens
        args, tlt = config.engine.engine_args, config.tlt
        self.shape = shape = ModelShape.of(model)
        self.on_gpu = config.engine.num_gpus > 0
        self.colocated = config.placement.kind == "colocated"
        self.drafts = config.engine.drafter is not None or tlt.harvests
        self.c = BFLOAT16 if config.policy.dtype == "bfloat16" else FLOAT32
        self.weights = self.c * shape.parameters
        self.longest_sample = prompt_tokens + config.sampling.max_tokens
        limit = args.get("max_model_len") or model.get("max_position_embeddings")
        self.max_model_len = int(limit or self.longest_sample)
        # Of one token on one GPU, with the drafter's layer.
        kv_bytes = 2 * shape.kv_heads * shape.head_dim * self.c * (shape.layers + self.drafts)
        self.kv_token = kv_bytes // max(1, config.engine.num_gpus)
        self.utilization = float(args.get("gpu_memory_utilization", UTILIZATION))
        vocab = tlt.draft_vocab_size or harvest_draft_vocabulary(shape.vocab, self.on_gpu)
        self.draft_vocab = min(vocab, shape.vocab)
        drafter = Eagle3Config(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, vocab_size=shape.vocab, draft_vocab_size=self.draft_vocab,
            aux_layer_ids=(0, 1, 2), rope_theta=1e4, rms_norm_eps=1e-6, max_position_embeddings=1,
        )  # fmt: skip
        self.drafter_parameters = drafter.num_parameters if self.drafts else 0
        captured = int(config.capture.capacity_gib * GIB)
        self.captured = (("captured states", captured),) * config.capture.enabled
        self.batched_tokens = int(args.get("max_num_batched_tokens", BATCHED_TOKENS))
        self.records = config.capture.enabled and config.capture.by == "engines"
        """Whether engines record the hidden states of their own steps."""
        captures = config.capture.enabled and not self.records
        row_tokens = max(config.learner.row_tokens, self.longest_sample)
        self.waiting = WAITING_ROWS * STATES * BFLOAT16 * row_tokens * shape.hidden * captures
        """Captured states of one rank that may wait on the host."""
        self.learner = learner_memory(
            shape,
            row_tokens=row_tokens,
            num_ranks=config.learner.num_ranks,
            dtype="bfloat16" if self.c == BFLOAT16 else "float32",
            gradient_checkpointing=config.learner.gradient_checkpointing,
            attention_kernel=bool(config.learner.num_gpus) and self.c == BFLOAT16,
            reference=config.algorithm.kl_weight > 0,
            captures=captures,
            lora=config.learner.lora,
        )
        ends = BFLOAT16 * shape.hidden * (2 * shape.vocab + self.draft_vocab)
        depth = tlt.num_draft_tokens or trained_draft_tokens(config.engine.strategy, self.on_gpu)
        work = FLOAT32 * tlt.row_tokens * depth
        work *= 3 * self.draft_vocab + 20 * shape.hidden
        self.trainer = TRAINER_COPIES * FLOAT32 * self.drafter_parameters + ends + work

    def changed(self, changes: Mapping[str, Any]) -> Sizes:
        """Return the sizes with other settings, by their dotted names."""
        config = self.config
        for key, value in changes.items():
            config = _changed(config, key.split("."), value)
        return Sizes(config, *self._given)


def memory_plan(sizes: Sizes) -> list[Place]:
    """Return every place of the run with its parts."""
    config, gpu_bytes = sizes.config, sizes.machine.gpu_bytes
    if not sizes.on_gpu:
        return [_cpu_host(sizes)]
    context = (("drafter's trainer: context", CONTEXT_BYTES),) * config.tlt.harvests
    resting = (("learner at rest", sizes.learner.resting + CONTEXT_BYTES),) * sizes.colocated
    asleep = (("sleeping engine", ASLEEP_BYTES),)
    engine = engine_parts(sizes)
    cache = max(0, int(sizes.utilization * (gpu_bytes or 0)) - sum(size for _, size in engine))
    note = f"engine.engine_args.gpu_memory_utilization = {sizes.utilization:g}"
    if gpu_bytes is not None:
        tokens = cache // sizes.kv_token
        note = f"KV cache of {tokens:,} tokens, {tokens / sizes.max_model_len:.1f} samples at once"
    parts = (*engine, ("KV cache", cache), *resting, *context * sizes.colocated)
    places = [Place("a GPU, generating", gpu_bytes, parts, note)]
    recorded = recorded_bytes(sizes, cache, pinned=True)
    if config.tlt.harvests:
        trainer = ("drafter's trainer", sizes.trainer + CONTEXT_BYTES)
        places.append(Place("a GPU, harvest", gpu_bytes, (trainer, *asleep, *resting)))
    if config.learner.num_gpus:
        peak = sizes.learner.peak
        parts = (
            ("learner", peak),
            ("learner: context, fragmentation", CONTEXT_BYTES + int(FRAGMENTED * peak)),
            *(*asleep, *context) * sizes.colocated,
        )
        places.append(Place("a GPU, update", gpu_bytes, parts, f"peak in {sizes.learner.moment}"))
    hosts = [_gpu_hosts(sizes, recorded, *counts) for counts in _fullest_nodes(sizes)]
    fullest = [max(same, key=lambda place: place.need) for same in zip(*hosts, strict=True)]
    return [*places, *fullest]


def engine_parts(sizes: Sizes) -> tuple[Part, ...]:
    """Return what an engine has on one GPU besides its KV cache."""
    engine, shape = sizes.config.engine, sizes.shape
    gpus, args = engine.num_gpus, engine.engine_args
    tokens = sizes.batched_tokens
    rows = int(args.get("max_num_seqs", MAX_SEQS)) * (sizes.draft_tokens + 1)
    working = sizes.c * tokens * (3 * shape.width // gpus + (3 + shape.active) * shape.hidden)
    working += 2 * FLOAT32 * rows * shape.vocab // gpus + GRAPH_BYTES + CONTEXT_BYTES
    parts = [("policy", sizes.weights // gpus), ("engine's working memory", working)]
    if sizes.drafts:
        # With its own copy of the policy's embedding.
        own = sizes.drafter_parameters + shape.vocab * shape.hidden
        parts.append(("drafter", sizes.c * own // gpus))
        # Every tensor-parallel rank has all hidden states.
        parts.append(("drafter's catch-up", engine.drafter_state_mib * 2**20))
    if sizes.records:
        parts.append(
            ("hidden states of one engine step", STATES * BFLOAT16 * tokens * shape.hidden)
        )
    return tuple(parts)


def recorded_bytes(sizes: Sizes, cache_bytes: int, pinned: bool) -> int:
    """Return the host memory for the hidden states of an engine's running samples.

    There is room for the tokens of some KV caches, and for engine steps on their way: pinned memory
    comes in powers of two, up to twice the size.
    """
    tokens = RECORDED_CACHES * (cache_bytes // sizes.kv_token)
    tokens += WAITING_STEPS * sizes.batched_tokens * (1 + pinned)
    return tokens * STATES * BFLOAT16 * sizes.shape.hidden * sizes.records


def _fullest_nodes(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the engines and ranks of the nodes that may be the fullest."""
    config, gpus = sizes.config, sizes.machine.num_gpus
    engines, ranks = config.pool.num_engines, config.learner.num_ranks
    if gpus is None:
        return [(engines, ranks)]
    most_engines = min(engines, max(1, gpus // config.engine.num_gpus))
    most_ranks = min(ranks, gpus)
    if sizes.colocated or engines * config.engine.num_gpus + ranks <= gpus:
        return [(most_engines, most_ranks)]
    return [(most_engines, 0), (0, most_ranks)]


def _gpu_hosts(sizes: Sizes, recorded: int, engines: int, ranks: int) -> list[Place]:
    config, shape, capacity = sizes.config, sizes.shape, sizes.machine.host_bytes
    harvests = config.tlt.harvests
    # Engines keep their policy on the host while the learner starts, and in the first RL step while
    # a trainer has their GPU. After a weight sync engines that sleep drop it.
    asleep = (("weights of sleeping engines", engines * sizes.weights),)
    processes = (("processes", (engines * (1 + harvests) + ranks) * PROCESS_BYTES),)
    lora = config.learner.lora
    dtype, size = (config.policy.dtype, sizes.c) if lora.rank else ("float32", FLOAT32)
    loading = ((f"ranks load the policy in {dtype}", ranks * size * shape.parameters),)
    saved = RESTING_BYTES * shape.trained(lora) * ranks // config.learner.num_ranks
    # Pinned memory comes in powers of two: up to twice the size.
    parked = 2 * moved_bytes(sizes.drafter_parameters)
    parked += 2 * BFLOAT16 * shape.vocab * shape.hidden
    waiting = (("captured states on their way", 2 * ranks * sizes.waiting),) * bool(sizes.waiting)
    running = (
        ("checkpoint on its way to disk", saved),
        ("new policy in shared memory", 2 * sizes.weights),
        *asleep * harvests,
        *processes,
        *sizes.captured,
        *waiting,
        *((RECORDED, engines * recorded),) * sizes.records,
        *(("trainers between leases", engines * parked),) * harvests,
    )
    return [
        Place("host, start", capacity, (*loading, *asleep * sizes.colocated, *processes)),
        Place("host, running", capacity, running),
    ]


def _cpu_host(sizes: Sizes) -> Place:
    config, engine = sizes.config, sizes.config.engine
    engines, ranks = config.pool.num_engines, config.learner.num_ranks
    harvests = config.tlt.harvests
    own = sizes.weights + sizes.c * sizes.drafter_parameters + int(engine.kv_cache_gib * GIB)
    own += engine.drafter_state_mib * 2**20 * sizes.drafts
    own += engine.ngram.history_tokens * HISTORY_BYTES if engine.ngram is not None else 0
    recorded = recorded_bytes(sizes, int(engine.kv_cache_gib * GIB), pinned=False)
    trainers = min(engines, config.tlt.max_trainers) * sizes.trainer
    parts = (
        ("engines", engines * own),
        ("learner", ranks * (sizes.learner.peak + sizes.waiting)),
        ("new policy in shared memory", 2 * sizes.weights),
        ("processes", (engines * (1 + harvests) + ranks) * CPU_PROCESS_BYTES),
        *(("drafter's trainers", trainers),) * harvests,
        *((RECORDED, engines * recorded),) * sizes.records,
        *sizes.captured,
    )
    return Place("host", sizes.machine.host_bytes, parts)


def _changed(settings: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    if isinstance(settings, dict):
        return settings | {keys[0]: _changed(settings.get(keys[0]), keys[1:], value)}
    inner = _changed(getattr(settings, keys[0]), keys[1:], value)
    return settings.model_copy(update={keys[0]: inner})
