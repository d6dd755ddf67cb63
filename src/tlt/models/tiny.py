"""Make a small random Llama or Qwen3-MoE with a byte tokenizer, for fast tests.

The weights are scaled so that the model behaves like a sharp language model rather than like noise.
The head spreads the logits: greedy choices have clear margins, so float32 results do not depend on
batch shapes. The embedding dominates the residual stream: the next token depends mostly on the last
one and a little on the context, which a drafter can learn in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")

LOGIT_STD = 3.0
EMBEDDING_STD = 1.0
LAYER_STD = 0.05


def make(
    out: Path,
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    head_dim: int = 32,
    max_position_embeddings: int = 4096,
    num_experts: int = 0,
    seed: int = 0,
) -> Path:
    """Write the model folder to `out`; with experts, a Qwen3-MoE that uses two for each token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = tokenizer()
    vocabulary = own.get_vocab()
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": hidden_size // (2 * head_dim),
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "pad_token_id": vocabulary["<|pad|>"],
        "eos_token_id": vocabulary["<|end|>"],
        "bos_token_id": None,
    }
    model: Any
    if num_experts:
        experts = {
            "num_experts": num_experts, "num_experts_per_tok": min(2, num_experts),
            "moe_intermediate_size": hidden_size, "norm_topk_prob": True,
        }  # fmt: skip
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                continue
            std = LAYER_STD
            if "embed_tokens" in name:
                std = EMBEDDING_STD
            elif "lm_head" in name or "mlp.gate." in name:
                std = LOGIT_STD / hidden_size**0.5  # routes, too, have clear margins
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.save_pretrained(out)
    own.save_pretrained(out)
    return out


def tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *bytes_])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_chat(backend)


def with_chat(backend: Any) -> Any:
    """Return the tokenizer of a chat model that encodes by `backend`."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    made.chat_template = CHAT_TEMPLATE
    return made
