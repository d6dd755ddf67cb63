"""matplotlib for files only, without a display. Import this module late: it is slow."""

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

__all__ = ["pyplot"]
