"""Every figure that the documentation states: its name, its result file, and how it is written."""

from registry import cpu, drafter, e2e, harvest, lossless, simulator, strategy, training
from registry.core import FIGURES, Results, UnknownFigure, render

__all__ = [
    "FIGURES",
    "Results",
    "UnknownFigure",
    "cpu",
    "drafter",
    "e2e",
    "harvest",
    "lossless",
    "render",
    "simulator",
    "strategy",
    "training",
]
