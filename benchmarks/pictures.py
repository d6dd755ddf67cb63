"""Draw every picture of benchmarks/results again, from the result files beside them.

    python benchmarks/pictures.py

Nothing is measured. Colours and ink are those of src/tlt/colours.py and src/tlt/pictures.py: the
pictures have no background, and can be read on light and dark pages.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from common import RESULTS
from common import load as result
from tlt.bench.plot import plot_decisions, plot_replay
from tlt.drafter.plot import plot_training
from tlt.observe.record import read
from tlt.report.plot import plot_run

HERE = Path(__file__).parent


def main() -> None:
    plot_training(result("drafter/report"), RESULTS / "drafter" / "report.png")
    records = list(read(RESULTS / "train" / "metrics.jsonl"))
    plot_run(records, RESULTS / "train" / "run.png", "SmolLM2-135M learns sums")
    plot_replay(result("strategy/strategy")["results"], RESULTS / "strategy" / "strategy.png")
    for path in sorted(RESULTS.glob("**/rollout.json")):
        for mode, decisions in json.loads(path.read_text())["decisions"].items():
            picture = path.with_name(f"{mode}.png")
            if picture.exists():
                plot_decisions(decisions, mode, picture)
    sys.path.insert(0, str(HERE / "e2e"))  # as if each script ran alone
    runpy.run_path(str(HERE / "e2e" / "workers.py"), run_name="__main__")


if __name__ == "__main__":
    main()
