"""Model folders with the published shapes of large models, without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 131072,
    },
    "qwen2_5_32b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 131072,
    },
    "qwen3_4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "qwen3_8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3_32b": {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip
"""The config.json of each model, as published, without what sizes do not depend on."""

PARAMETERS = {
    "qwen2_5_7b": 7.62e9,
    "qwen2_5_32b": 32.8e9,
    "qwen3_4b": 4.02e9,
    "qwen3_8b": 8.19e9,
    "qwen3_32b": 32.8e9,
    "qwen3_30b_a3b": 30.5e9,
}
"""The published number of parameters of each model."""


def make(name: str, out: Path) -> Path:
    """Write the model's config.json, a byte tokenizer with a chat template, and empty weights."""
    from tlt.models import tiny

    tiny.tokenizer().save_pretrained(out)
    (out / "config.json").write_text(json.dumps(SHAPES[name]))
    # A file of weights without any tensor: the length of its list, and an empty list.
    (out / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return out
