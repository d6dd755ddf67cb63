"""Shapes of large models, for what is calculated about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A dense Llama- or Qwen-type model, as its public config.json says."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    qkv_bias: bool
    gpus_per_engine: int
    head_dim: int = 128

    @property
    def parameters(self) -> int:
        """Return the number of parameters; embedding and head are not tied."""
        queries, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + keys) + self.qkv_bias * (queries + keys)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden

    def hf_config(self) -> dict[str, int]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
        }

    def drafter_parameters(self, draft_vocab: int) -> int:
        """Return the drafter's parameters: fusion, one layer over two inputs, norms, head."""
        queries, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys) + queries * self.hidden
        layer = attention + 3 * self.hidden * self.intermediate + 4 * self.hidden
        return 3 * self.hidden**2 + layer + draft_vocab * self.hidden


MODELS = (
    Model("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, True, gpus_per_engine=1),
    Model("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064, True, gpus_per_engine=4),
    Model("Llama-3-70B", 8192, 28672, 80, 64, 8, 128256, False, gpus_per_engine=8),
)
"""Shapes: config.json of Qwen/Qwen2.5-7B, Qwen/Qwen2.5-32B and meta-llama/Meta-Llama-3-70B on
Hugging Face. GPUs of an engine: the recipes for the first two, assumed for the last."""
