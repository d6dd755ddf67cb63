"""LoRA: adapters on a frozen policy, by peft's layers.

The learner trains float32 adapters, and keeps the policy's own weights unchanged in the compute
dtype. Everybody else gets merged weights, under the names that the policy has without adapters.
Merging computes new tensors in float32 from the unchanged ones, so the same adapters always make
the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tlt.config.train import LoraConfig

NAME = "default"
"""Name of the adapter in peft's layers."""
A, B = f"lora_A.{NAME}.weight", f"lora_B.{NAME}.weight"
BASE = "base_layer."
"""The part that peft adds to the name of a layer's own weights."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.endswith((A, B))


def linear_layers(policy: Any) -> list[str]:
    """Return the short names of the linear layers that can have an adapter."""
    found = policy.model.layers.named_modules()
    return sorted({name.rpartition(".")[2] for name, of in found if isinstance(of, nn.Linear)})


def add_adapters(policy: Any, lora: LoraConfig, seed: int) -> None:
    """Add new adapters, the same for a seed, to a policy in the compute dtype; freeze the rest."""
    import peft

    settings = _settings(lora, lora.target_modules or linear_layers(policy))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, policy, NAME)
    for name, parameter in policy.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


@contextmanager
def without_adapters(policy: nn.Module) -> Iterator[None]:
    """Compute with the policy from before training."""
    layers: list[Any] = [module for module in policy.modules() if hasattr(module, "set_scale")]
    try:
        for layer in layers:
            layer.set_scale(NAME, 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


Parts = tuple[torch.Tensor, ...]


def parts(policy: nn.Module) -> Iterator[tuple[str, Parts]]:
    """Yield every tensor of a policy by its name without adapters: what `merged` takes."""
    named = dict(policy.named_parameters())
    for name, parameter in named.items():
        if not is_adapter(name):
            layer = name.removesuffix(f"{BASE}weight")
            adapter = [named[layer + end] for end in (A, B)] if layer != name else []
            yield name.replace(BASE, ""), (parameter, *adapter)


def merged(found: Parts, lora: LoraConfig, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of a layer's weight with its adapter; one without adapter is cast."""
    weight, *adapter = found
    if adapter:
        a_RI, b_OR = adapter
        weight = weight.float() + lora.alpha / lora.rank * (b_OR @ a_RI)
    return weight.to(dtype)


def merged_policy(
    source: Path, adapter: Mapping[str, torch.Tensor], lora: LoraConfig, dtype: str
) -> dict[str, torch.Tensor]:
    """Return the weights of the policy in `source` with an adapter by the names in the learner."""
    from transformers import AutoModelForCausalLM

    compute = getattr(torch, dtype)
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=compute)
    weights = {}
    for name, parameter in policy.named_parameters():
        layer = name.removesuffix("weight")
        own = [adapter[layer + end] for end in (A, B)] if layer + A in adapter else []
        weights[name] = merged((parameter.detach(), *own), lora, compute)
    return weights


def write_adapter(
    weights: Mapping[str, torch.Tensor], lora: LoraConfig, source: Path, folder: Path
) -> None:
    """Write adapters, by their names in the learner, in peft's own format."""
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
    settings = _settings(lora, sorted(layers))
    settings.base_model_name_or_path, settings.inference_mode = str(source), True
    settings.save_pretrained(folder)
    kept = {f"base_model.model.{name.replace(f'.{NAME}', '')}": of for name, of in weights.items()}
    save_file(kept, folder / "adapter_model.safetensors", {"format": "pt"})


def _settings(lora: LoraConfig, target_modules: list[str]) -> Any:
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=target_modules
    )
