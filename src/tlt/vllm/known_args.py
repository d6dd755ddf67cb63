"""The names and types of vLLM's engine arguments, read from its source. Does not import vLLM.

vLLM takes any type for most arguments and fails minutes later, in the engine's process. The source
is that of the installed version, so nothing here has to follow vLLM's releases.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError

TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "dict[str, Any]": (dict,),
    "None": (type(None),),
}
"""Types that are checked; an argument of any other type is left to vLLM."""
LIMITS = {
    "data_parallel_size": (1, 10_000),
    "gpu_memory_utilization": (0.01, 1),
    "max_model_len": (1, 1_000_000_000),
    "max_num_batched_tokens": (1, 100_000_000),
    "max_num_seqs": (1, 100_000),
    "tensor_parallel_size": (1, 10_000),
}
"""Smallest and largest value of arguments that plans are made from."""


def check_args(given: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, and values of a wrong type."""
    known = arguments()
    for name, value in given.items():
        if known is not None and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"engine_args.{name} is no argument of vLLM; {hint}")
        kind = known[name] if known is not None else ""
        if value is not None and not _is_of(value, kind):
            raise ConfigError(
                f"engine_args.{name} = {repr(value)[:60]} should be {kind}; remove it to have "
                "vLLM's default"
            )
        low, high = LIMITS.get(name, (None, None))
        if low is None or high is None or value is None:
            continue
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"engine_args.{name} = {repr(value)[:60]} should be a number from {low:g} to "
                f"{high:g}; remove it to have vLLM's default"
            )


@cache
def arguments() -> dict[str, str] | None:
    """Return the type of every argument as vLLM writes it; None without vLLM's source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()
    except OSError:
        return None
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return {
                field.target.id: ast.unparse(field.annotation)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
    return None


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a type, as far as the type is one of `TYPES`."""
    parts = [part.strip() for part in kind.split(" | ")]
    if any(part not in TYPES for part in parts):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    allowed = {each for part in parts for each in TYPES[part]}
    return type(value) in allowed
