"""Peak memory of one learner rank, as a formula. Pure.

The formula follows the tensors that `tlt.learner.rank` holds at once in three moments of an
update's later rows, when gradients and optimizer moments are there: the backward pass of the head,
of a layer, and the reduction of the gradients of embedding and head. The peak is the largest of the
three. `benchmarks/learner_memory.py` counts the same bytes with torch's memory tracker, and a test
keeps formula and tracker together.

What a GPU needs besides tensors (CUDA context, NCCL, fragmentation) is not part of it. Dense Llama-
and Qwen-type models only. Symbols: T tokens of a row, H hidden, I intermediate, Q and K width of
queries and keys, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt.hardware import Dtype

FLOAT32 = 4
STATE_BYTES = 16
"""Bytes of a parameter in its rank: float32 weight, gradient and two moments."""
RESTING_BYTES = 12
"""Bytes of a parameter between updates, without its gradient."""
HEAD_CHUNK_TOKENS = 2048
"""Largest number of tokens whose logits are in memory at once."""
LOGITS = 3
"""Float32 tensors of the size of the logits in the backward pass of the head."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense model, as its config.json says."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether the head is the embedding."""
    qk_norm: bool
    """Whether queries and keys are normalized, as in Qwen3."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a model's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, without biases, which are too small to count."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate + 2)

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.end_parameters + self.layers * self.layer_parameters

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes of one rank."""

    resting: int
    """Bytes between updates: weights and moments."""
    peak: int
    """Bytes at the peak of an update."""
    moment: str
    """The part of the update in which the peak lies."""


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
) -> LearnerMemory:
    """Return the memory of a rank whose largest row has `row_tokens`, all of them learned.

    `attention_kernel`: attention by `varlen_attn`. `reference`: a copy of the first policy for the
    KL divergence. `captures`: the rank captures hidden states.
    """
    c = 2 if dtype == "bfloat16" else FLOAT32
    tokens, hidden = row_tokens, shape.hidden
    layer, ends, head = shape.layer_parameters, shape.end_parameters, shape.vocab * hidden
    resting = RESTING_BYTES * shape.parameters // num_ranks
    always = STATE_BYTES * shape.parameters // num_ranks + c * ends
    if reference:
        own = FLOAT32 * shape.parameters // num_ranks
        resting, always = resting + own, always + own + c * ends
    if captures:
        always += 4 * 2 * tokens * hidden  # three fused states and the final one in bfloat16
    saved = tokens * _saved_bytes(shape, c, attention_kernel)
    inputs = c * tokens * hidden  # of a layer
    kept = shape.layers * (inputs if gradient_checkpointing else saved)
    chunk = LOGITS * FLOAT32 * min(HEAD_CHUNK_TOKENS, tokens) * shape.vocab
    in_head = c * (head + layer) + chunk + kept + tokens * hidden * (FLOAT32 + 5 * c // 2)
    in_layer = c * (head + 2 * layer + hidden * shape.intermediate) + kept  # one gathered ahead
    in_layer += c * tokens * (2 * shape.intermediate + hidden)
    if gradient_checkpointing:
        # In the last layer but one: the last one's gradients are on their way to the other ranks.
        in_layer += saved - inputs + FLOAT32 * layer
    # Embedding and head themselves are gone by then, their gradients have their place.
    at_end = FLOAT32 * ends
    moment, extra = max(
        (("the head's backward pass", in_head), ("a layer's backward pass", in_layer),
         ("the gradients of embedding and head", at_end)),
        key=lambda found: found[1],
    )  # fmt: skip
    return LearnerMemory(resting, always + extra, moment)


def _saved_bytes(shape: ModelShape, c: int, attention_kernel: bool) -> int:
    """Return the bytes that one layer saves for its backward pass, for a token."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms keep their input in float32; their two outputs each, and the four of the MLP.
    saved = 2 * FLOAT32 * shape.hidden + c * 4 * (shape.hidden + shape.intermediate)
    # The loop over samples repeats keys and values for every head.
    saved += c * (2 * (queries + keys) if attention_kernel else 5 * queries)
    if shape.qk_norm:
        saved += (FLOAT32 + c) * (queries + keys)
    return saved
