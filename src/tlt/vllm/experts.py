"""The weights of a layer's experts, read from vLLM's layout.

vLLM stacks the matrices of all experts: gate and up projection in `w13_weight`, down projection in
`w2_weight`. Its CPU kernels read a packed copy, in which the numbers of each expert have other
places. Packing is the same for all experts, so the places are found by packing a matrix that counts
its rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tlt.node.fingerprint import columns

PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""vLLM's stacks, and an expert's matrices in them, one below the other."""
TOGETHER = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""The names of the stacks in transformers."""
PLAIN = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels that read the experts as they were loaded."""
MAX_ROWS = 2**15
"""Rows that 16 bits count."""


def is_readable(layer: Any) -> bool:
    """Return whether a layer's experts are in a form that this module knows."""
    method = getattr(layer, "quant_method", None)
    backend = getattr(getattr(method, "unquantized_backend", None), "value", None)
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if backend != "CPU" or kernel is None or not hasattr(kernel, "isa"):
        return backend in PLAIN
    size = layer.moe_config.intermediate_size_per_partition
    is_padded = size != kernel._padded_intermediate_size(layer.moe_config)
    return not is_padded and max(2 * size, layer.moe_config.hidden_dim) < MAX_ROWS


def columns_of(layer: Any, stack: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the columns that a seed selects from a stack of matrices, [rows of all, n]."""
    chosen = columns(seed, stack.shape[-1])
    kernel = layer.quant_method.moe_kernel.fused_experts
    if not hasattr(kernel, "isa") or kernel._use_zentorch:
        return stack[..., chosen].flatten(0, -2)
    places_nR = _packed_places(*stack.shape[1:], stack.dtype, kernel.isa, tuple(chosen))
    return stack.reshape(len(stack), -1)[:, places_nR].transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=4)
def _packed_places(
    num_rows: int, width: int, dtype: torch.dtype, isa: str, chosen: tuple[int, ...]
) -> torch.Tensor:
    """Return where packing puts the numbers of these columns of a matrix, [n, row]."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    found = []
    for column in chosen:
        rows = torch.zeros(1, num_rows, width, dtype=whole)
        rows[0, :, column] = torch.arange(1, num_rows + 1)
        packed = cpu_prepack_moe_weight(rows.view(dtype), isa).view(whole).flatten()
        places = packed.nonzero()[:, 0]
        found.append(places[packed[places].argsort()])
    return torch.stack(found)
