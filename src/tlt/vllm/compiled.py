"""Compiles functions over arrays to machine code (numba)."""

from __future__ import annotations

from typing import Any

from numba import njit


def compiled(function: Any) -> Any:
    """Compile a function, and cache the machine code beside the source if that is writable.

    A product and a sum may become one instruction. Everything else is computed as written, so that
    a row's result depends on the row alone.
    """
    options = {"fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache
        return njit(**options)(function)
