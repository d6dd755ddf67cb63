"""Fingerprints of weights: is what an engine computes with what the learner handed out?

A fingerprint is one number for every tensor, made from a few of its columns. Engines cannot show
all of their weights: CPU kernels pack matrices and drop the originals. But the product of a matrix
and a one-hot vector is one of its columns, exactly, in whatever form the matrix is kept and with
any kernel, because everything else is multiplied by zero. So engines compute the columns with the
very code that generates samples, and both sides add up the same numbers.

The numbers do not depend on the order of rows: a matrix that an engine keeps fused with others has
the sum of their numbers, and rows of zeros that pad it count nothing. Which columns are taken
follows from a seed, another one for every version, so that in the long run all of them are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

NUM_COLUMNS = 8
TINY = 1e-30
"""Smaller values count as zero: some kernels treat them so."""
_MASK = 2**64 - 1


def columns(seed: int, width: int) -> list[int]:
    """Return the columns that are looked at of a matrix of this width."""
    return sorted(random.Random(f"{seed}/{width}").sample(range(width), min(NUM_COLUMNS, width)))


def tensor_fingerprint(tensor: torch.Tensor, seed: int) -> int:
    """Return the number of a tensor whose values are all at hand."""
    if tensor.dim() == 2:
        tensor = tensor[:, columns(seed, tensor.shape[1])]
    return values_fingerprint(tensor)


def values_fingerprint(values: torch.Tensor) -> int:
    """Return the sum of a hash of every value, whatever their order."""
    if not values.is_floating_point():
        bits = values.reshape(-1).long()
    else:
        flat = values.reshape(-1).contiguous()
        flat = torch.where(flat.abs() < TINY, torch.zeros_like(flat), flat)
        bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        bits = bits.long()
    # Integer products wrap around; zero stays zero.
    hashed = bits * 0x2545F4914F6CDD1D
    hashed = (hashed ^ (hashed >> 29)) * 0x369DEA0F31A53F85
    hashed = hashed ^ (hashed >> 32)
    return int(hashed.sum()) & _MASK


def fingerprints(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, seed: int
) -> dict[str, int]:
    """Return the numbers of named tensors as they are in this dtype."""
    found = {}
    for name, tensor in tensors:
        if tensor.dim() == 2:
            tensor = tensor[:, columns(seed, tensor.shape[1])]
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        found[name] = values_fingerprint(tensor)
    return found


def added(numbers: Iterable[int]) -> int:
    """Return the number of tensors that are kept as one."""
    return sum(numbers) & _MASK
