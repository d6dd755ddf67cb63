"""Drafter folders: `config.json` and `model.safetensors` as stock vLLM loads them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter


def save_drafter(drafter: Eagle3Drafter, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a drafter folder; the last rename makes it complete."""
    out.mkdir(parents=True, exist_ok=True)
    weights = drafter_weights(drafter, dtype)
    partial = out / "model.safetensors.partial"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
    config = drafter.config.to_hf(str(dtype).removeprefix("torch."))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(out / "model.safetensors")
    return out


def drafter_weights(drafter: Eagle3Drafter, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The drafter's tensors under the names that vLLM loads."""
    weights = {}
    for name, tensor in drafter.state_dict().items():
        if name == "d2t":
            # vLLM expects the mapping only when the draft vocabulary is a smaller one.
            if drafter.config.draft_vocab_size != drafter.config.vocab_size:
                weights[name] = tensor.cpu()
        else:
            weights[name] = tensor.detach().to("cpu", dtype)
    return weights


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    config = Eagle3Config.from_hf(json.loads((folder / "config.json").read_text()))
    drafter = Eagle3Drafter(config)
    state = load_file(folder / "model.safetensors")
    state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    drafter.load_state_dict(state)
    return drafter.to(dtype)
