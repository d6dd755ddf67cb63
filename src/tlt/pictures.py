"""matplotlib for files only: no display is ever looked for. Import it late, for it is slow."""

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

__all__ = ["pyplot"]
