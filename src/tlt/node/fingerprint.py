"""Fingerprints of weights: does an engine compute with the weights that the learner handed out?

A fingerprint is made from a few columns of a tensor. Engines cannot show all of their weights: CPU
kernels pack matrices and drop the originals. But the product of a matrix and a one-hot vector is
exactly one of its columns, for every memory layout and every kernel, because all other columns are
multiplied by zero. So engines compute the columns with the code that generates samples, and both
sides add up the same numbers. The exception is float32 on GPUs, which may round the matrix to TF32:
those engines read the matrix itself.

A fingerprint is two sums over hashes of the values: a plain one, and one weighted by row and
column. The fingerprint of a fused matrix follows from the fingerprints of its parts. Rows of zeros
that pad a matrix add nothing. A seed selects the columns. Every version of the weights has another
seed, so in the long run every column is checked.

Shapes: R rows, n selected columns.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

NUM_COLUMNS = 8
TINY = 1e-30
"""Magnitude below which a value counts as zero, because some kernels flush it to zero."""
_MASK = 2**64 - 1
_ROW, _COLUMN = 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82B
"""Increments of a value's weight from row to row and from column to column."""


class Fingerprint(NamedTuple):
    """The fingerprint of one tensor."""

    plain: int
    weighted: int
    num_rows: int

    def same(self, other: Fingerprint | None) -> bool:
        """Return whether the values are the same, apart from rows of zeros at the end."""
        return other is not None and self[:2] == other[:2]


def columns(seed: int, width: int) -> list[int]:
    """Return the columns that a seed selects from a matrix of this width."""
    return sorted(random.Random(f"{seed}/{width}").sample(range(width), min(NUM_COLUMNS, width)))


def fingerprint(tensor: torch.Tensor, seed: int, dtype: torch.dtype | None = None) -> Fingerprint:
    """Return the fingerprint of a tensor, converted to `dtype` if one is given.

    The matrices of a stack are one below the other.
    """
    if tensor.dim() >= 2:
        tensor = tensor[..., columns(seed, tensor.shape[-1])].flatten(0, -2)
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return of_columns(tensor if tensor.dim() == 2 else tensor.reshape(-1, 1))


def of_columns(values_Rn: torch.Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor, given its selected columns."""
    hash_Rn = _hashes(values_Rn)
    row_R = torch.arange(len(hash_Rn), device=hash_Rn.device)
    column_n = torch.arange(hash_Rn.shape[1], device=hash_Rn.device)
    # Integer products wrap around, as a sum modulo 2^64 requires.
    weight_Rn = row_R[:, None] * _signed(_ROW) + column_n * _signed(_COLUMN) + 1
    return Fingerprint(
        int(hash_Rn.sum()) & _MASK, int((hash_Rn * weight_Rn).sum()) & _MASK, len(hash_Rn)
    )


def fused(parts: Sequence[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of tensors that are concatenated by rows."""
    plain = weighted = offset = 0
    for part in parts:
        plain += part.plain
        weighted += part.weighted + offset * _ROW * part.plain
        offset += part.num_rows
    return Fingerprint(plain & _MASK, weighted & _MASK, offset)


def fingerprints(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, seed: int
) -> dict[str, Fingerprint]:
    """Return the fingerprints of named tensors, converted to `dtype`."""
    return {name: fingerprint(tensor, seed, dtype) for name, tensor in tensors}


def _hashes(values: torch.Tensor) -> torch.Tensor:
    """Return one integer for every value; 0 for zero."""
    if not values.is_floating_point():
        bits = values.long()
    elif values.element_size() == 1:
        bits = values.contiguous().view(torch.int8).long()
    else:
        values = torch.where(values.abs() < TINY, torch.zeros_like(values), values).contiguous()
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = values.view(integers[values.element_size()]).long()
    hashed = bits * 0x2545F4914F6CDD1D
    hashed = (hashed ^ (hashed >> 29)) * 0x369DEA0F31A53F85
    return hashed ^ (hashed >> 32)


def _signed(number: int) -> int:
    """Return the signed number with the same 64 bits, because torch takes no unsigned one."""
    return number - 2**64 if number >= 2**63 else number
