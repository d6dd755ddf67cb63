"""Base of all settings: immutable, no unknown keys, described by docstrings.

Numbers are finite, and small enough for exact arithmetic. Settings that cost time or memory have
tighter limits.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 1e15
LONGEST_S = 1e7
"""Longest time limit: four months."""


class Schema(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_usable(cls, value: Any) -> Any:
        """Refuse what no setting means: absurd numbers, and text that no file name may hold."""
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError(f"at most {LARGEST_INT}")
        if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
            raise ValueError(f"at most {LARGEST_FLOAT:g}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("text without NUL characters")
        return value
