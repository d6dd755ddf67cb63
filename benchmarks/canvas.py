"""matplotlib without a display, for files only. Import it late: it is slow.

Pictures have no background, and ink that can be read on light and dark pages.
"""

import matplotlib

matplotlib.use("Agg")

from cycler import cycler
from matplotlib import pyplot

from tlt.colours import COLOURS, INK

__all__ = ["pyplot"]

_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_BARE = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
pyplot.rcParams.update(
    dict.fromkeys((*_INKED, "axes.titlecolor", "grid.color"), INK)
    | dict.fromkeys(_BARE, "none")
    | {"axes.prop_cycle": cycler(color=COLOURS), "grid.alpha": 0.3, "legend.frameon": False}
    | {"axes.spines.top": False, "axes.spines.right": False}
    | {"axes.titlesize": 11, "figure.titlesize": 12, "figure.titleweight": "bold"}
)
