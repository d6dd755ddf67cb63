"""Shape of an EAGLE-3 drafter, derived from its target, in the config format vLLM reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
LARGE_VOCABULARY, DRAFT_VOCABULARY = 65536, 32768
"""Policies with more tokens than the first get drafters of the second many tokens by default."""
CPU_DRAFT_VOCABULARY = 4096
"""Tokens of a drafter that CPU cores train during a run."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One decoder layer over three of the target's hidden states and the token embedding."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """The target's hidden states that are fused: i is the input of layer i."""
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def drafts_all_tokens(self) -> bool:
        """Whether the draft vocabulary is the policy's."""
        return self.draft_vocab_size == self.vocab_size

    @classmethod
    def for_target(cls, target: Any, draft_vocab_size: int | None = None) -> Eagle3Config:
        """Derive the drafter of a Llama- or Qwen-type target from its Hugging Face config."""
        heads = target.num_attention_heads
        rope = getattr(target, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
            aux_layer_ids=default_aux_layers(target.num_hidden_layers),
            rope_theta=float(theta),
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the drafter; the embedding is the target's."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        per_hidden = len(self.aux_layer_ids) * self.hidden_size  # fusion
        per_hidden += 3 * queries + 4 * keys  # two inputs, one output
        per_hidden += 3 * self.intermediate_size + self.draft_vocab_size + 4  # MLP, head, norms
        return self.hidden_size * per_hidden

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """Return the `config.json` of a drafter folder."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Eagle3Config:
        """Read the `config.json` of a drafter folder."""
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            aux_layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            rope_theta=config["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
        )


def harvest_draft_vocabulary(vocab_size: int, on_gpu: bool) -> int:
    """Return the size of the vocabulary of a drafter that a run makes and trains.

    A CPU core has a few minutes for it, most of which a large head would take.
    """
    default = default_draft_vocabulary(vocab_size)
    return default if on_gpu else min(default, CPU_DRAFT_VOCABULARY)


def default_draft_vocabulary(vocab_size: int) -> int:
    """Return the size of a new drafter's vocabulary: all tokens, unless the policy has many.

    The head is most of a drafter with a large vocabulary, and rare tokens are hardly ever drafted.
    """
    return DRAFT_VOCABULARY if vocab_size > LARGE_VOCABULARY else vocab_size


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high layer: vLLM's 2, L/2 and L-3, spread in shallow models."""
    layers = (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) == 3 and list(layers) == sorted(layers):
        return layers
    if num_layers < 3:
        raise ValueError(f"EAGLE-3 fuses three hidden states; the target has {num_layers} layers")
    return (1, max(2, num_layers // 2), num_layers - 1) if num_layers > 3 else (0, 1, 2)
