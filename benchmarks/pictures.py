"""Draw every picture of benchmarks/results again, from the result files beside them.

    python benchmarks/pictures.py

Nothing is measured. The code of `tlt` draws: SVG that can be read on light and dark pages.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from common import RESULTS
from common import load as result
from tlt.bench import charts
from tlt.report.charts import charts_of, training_picture
from tlt.report.svg import sheet
from tlt.report.view import look_at

HERE = Path(__file__).parent


def main() -> None:
    drawn = training_picture(result("drafter/report"))
    (RESULTS / "drafter" / "report.svg").write_text(drawn)
    plot_run(RESULTS / "train", "SmolLM2-135M learns sums")
    adaptive = result("strategy/live/rollout")["decisions"]["adaptive"]
    drawn = charts.decisions(adaptive, "adaptive")
    (RESULTS / "strategy" / "live" / "adaptive.svg").write_text(drawn)
    sys.path.insert(0, str(HERE / "e2e"))  # as if each script ran alone
    runpy.run_path(str(HERE / "e2e" / "workers.py"), run_name="__main__")


def plot_run(folder: Path, title: str) -> None:
    """Draw the rewards and the seconds of a run, as its report shows them."""
    (found,) = charts_of([look_at(folder)])
    (folder / "run.svg").write_text(sheet(title, [found["reward"], found["stages"]]))


if __name__ == "__main__":
    main()
