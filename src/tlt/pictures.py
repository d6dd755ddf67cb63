"""matplotlib without a display, for files only. Import it late: it is slow."""

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

__all__ = ["pyplot"]
