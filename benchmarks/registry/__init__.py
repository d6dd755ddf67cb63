"""Every figure that the documentation states: its name, its result file, and how it is written."""

from registry import (
    cpu,
    dispatch,
    drafter,
    e2e,
    faults,
    following,
    frameworks,
    harvest,
    look_ahead,
    lossless,
    siblings,
    simulator,
    strategy,
    training,
    words,
)
from registry.core import FIGURES, Results, UnknownFigure, render

__all__ = [
    "FIGURES",
    "Results",
    "UnknownFigure",
    "cpu",
    "dispatch",
    "drafter",
    "e2e",
    "faults",
    "following",
    "frameworks",
    "harvest",
    "look_ahead",
    "lossless",
    "render",
    "siblings",
    "simulator",
    "strategy",
    "training",
    "words",
]
