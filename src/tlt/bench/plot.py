"""Pictures of benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_running(result: dict[str, Any], out: Path) -> Path:
    """Requests still unfinished over time, one line per mode: each mode's median run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    num = result["workload"]["num_requests"]
    for row in result["summary"]:
        runs = sorted(
            (r for r in result["runs"] if r["mode"] == row["mode"]), key=lambda r: r["wall_s"]
        )
        curve = runs[len(runs) // 2]["curve"]
        label = f"{row['mode']}  ({row['wall_s']['median']:.0f} s)"
        axes.step([p[0] for p in curve], [p[1] for p in curve], where="post", label=label)
    axes.axhline(num / 8, color="0.6", linestyle=":", linewidth=1)
    axes.annotate("1/8 of the requests", (0.01, num / 8), xycoords=("axes fraction", "data"),
                  va="bottom", fontsize=8, color="0.4")  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("unfinished requests")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{num} requests, {result['workload']['total_tokens']} tokens, "
        f"longest {result['workload']['longest']}, {result['num_engines']} engines"
    )
    axes.legend(title="mode (median wall time)")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out
