"""The experts of a policy by the names of its checkpoint.

transformers keeps all experts of a layer in two tensors. Published checkpoints have three matrices
for each expert. So have the weights that go to engines, into exported folders and fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

EXPERTS = ".experts."
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of all experts, and the matrices of one expert in them, row after row."""


def by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of the policy as its checkpoint has it: one by one where it is of experts."""
    layer, _, kind = name.rpartition(EXPERTS)
    if kind not in PARTS or not layer:
        yield name, tensor
        return
    parts = PARTS[kind]
    for index, expert in enumerate(tensor):
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{layer}{EXPERTS}{index}.{part}.weight", matrix
