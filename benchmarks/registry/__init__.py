"""Every figure that the documentation states: its name, its result file, and how it is written."""

# ruff: noqa: F401  (each module declares its figures when it is imported)
from registry import (
    drafter,
    e2e,
    emulated,
    faults,
    following,
    frameworks,
    harvest,
    lossless,
    simulator,
    strategy,
    training,
    tried,
    words,
)
from registry.core import FIGURES, Results, UnknownFigure, render

__all__ = ["FIGURES", "Results", "UnknownFigure", "render"]
