"""What several commands ask for in the same way."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

import typer

Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")]


def require_plots() -> None:
    """Ask for the plotting library before the work, not after it."""
    from tlt.errors import ConfigError

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib; run: pip install 'tlt-rl[plot]'")
