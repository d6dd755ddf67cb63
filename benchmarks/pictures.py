"""Draw every picture of benchmarks/results again, from the result files beside them.

    python benchmarks/pictures.py

Nothing is measured. The code of `tlt` draws: SVG that can be read on light and dark pages.
"""

from __future__ import annotations

import json
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
    for path in sorted(RESULTS.glob("**/rollout.json")):
        rollout = json.loads(path.read_text())
        path.with_suffix(".svg").write_text(charts.running(rollout))
        for mode, decisions in rollout["decisions"].items():
            if ":" not in mode and mode != "off":
                picture = charts.decisions(decisions, mode)
                path.with_name(f"{mode}.svg").write_text(picture)
    sys.path.insert(0, str(HERE / "e2e"))  # as if each script ran alone
    runpy.run_path(str(HERE / "e2e" / "workers.py"), run_name="__main__")


def plot_run(folder: Path, title: str) -> None:
    """Draw the rewards and the seconds of a run, as its report shows them."""
    (found,) = charts_of([look_at(folder)])
    (folder / "run.svg").write_text(sheet(title, [found["reward"], found["stages"]]))


if __name__ == "__main__":
    main()
