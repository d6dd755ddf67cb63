"""The sizes of a policy, which the memory plan computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt.config.train import LoraConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, as its config.json says."""

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
    experts: int = 0
    """Experts of a layer; 0 in a dense model."""
    active: int = 1
    """Experts that a token uses."""
    expert_intermediate: int = 0

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
            experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            active=config.get("num_experts_per_tok") or 1,
            expert_intermediate=config.get("moe_intermediate_size") or 0,
        )

    @property
    def width(self) -> int:
        """Numbers between the two products of a token's MLP, in all experts that it uses."""
        return self.active * self.expert_intermediate if self.experts else self.intermediate

    @property
    def stack_parameters(self) -> int:
        """Parameters of the largest tensor of an MLP; transformers stacks gates and ups of all
        experts."""
        inner = 2 * self.experts * self.expert_intermediate if self.experts else self.intermediate
        return self.hidden * inner

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, without biases, which are too small to count."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = 3 * self.intermediate
        if self.experts:
            mlp = self.experts * (3 * self.expert_intermediate + 1)
        return self.hidden * (2 * queries + 2 * keys + mlp + 2)

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.end_parameters + self.layers * self.layer_parameters

    def adapter(self, lora: LoraConfig) -> tuple[int, int]:
        """Return the adapter parameters of a layer, and the features inside its adapters."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            **{"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys},
            **{"o_proj": hidden + queries, "gate_proj": hidden + inner, "up_proj": hidden + inner},
            "down_proj": hidden + inner,
        }
        chosen = [width for name, width in widths.items() if name in lora.target_modules]
        chosen = chosen if lora.target_modules else [*widths.values()]
        return lora.rank * sum(chosen), lora.rank * len(chosen)

    def trained(self, lora: LoraConfig) -> int:
        """Return the parameters that have gradients and moments."""
        return self.layers * self.adapter(lora)[0] if lora.rank else self.parameters
