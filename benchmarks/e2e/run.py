"""Compare ways to make the same RL run, end to end, on a machine whose speed drifts.

    python benchmarks/e2e/run.py tail [SECTION.KEY=VALUE ...] [--arms off,tlt] [--steps 20]
        [--at-once 2] [--name NAME] [--anew]

A scenario (`scenarios/*.toml`, or a path; the format stands in `scenario.py`) names a run and its
arms. Every arm is a `tlt train` of its own. All arms of a group stay loaded and take turns, RL step
by RL step, in another order each time; so every ratio compares RL steps that are seconds apart.
`--at-once` is the number of arms in memory: with more arms than that, the reference runs again
beside each group.

Writes results/e2e/pairs/<name>.json: the speed-ups over the reference with intervals (`pairs.py`),
whether the arms generated the same samples and left the same policy, and a record of every turn. A
complete group with the same settings is not run again, unless with `--anew`, and stays in the file
when other arms are run. The runs are left in runs/e2e/<name>.

`--arms` chooses arms, the reference first. Overrides hold for all arms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pairs
import steps
from scenario import Scenario, load
from turns import Arms, Run, RunEnded

from tlt.observe.provenance import provenance

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results" / "e2e" / "pairs"
ALL_SAMPLES = 1_000_000


class Comparison:
    """The result file of one scenario, written anew after every RL step."""

    def __init__(self, name: str, scenario: Scenario, anew: bool) -> None:
        self.path = RESULTS / f"{name}.json"
        self.scenario = scenario
        self.groups: list[dict[str, Any]] = []
        self.turns: list[dict[str, Any]] = []
        self._settings = json.loads(json.dumps(asdict(scenario)))
        if self.path.exists() and not anew:
            self._keep(json.loads(self.path.read_text()))

    def _keep(self, before: dict[str, Any]) -> None:
        """Take over complete groups of arms that are as they were."""
        arms, known = self._settings["arms"], before["scenario"]["arms"]
        changed = {arm for arm in arms if known.get(arm, arms[arm]) != arms[arm]}
        same = {key: value for key, value in self._settings.items() if key not in ("about", "arms")}
        if changed or not same.items() <= before["scenario"].items():
            return
        done = [i for i, group in enumerate(before["groups"]) if group["complete"]]
        self.groups = [before["groups"][i] for i in done]
        self.turns = [
            turn | {"group": done.index(turn["group"])}
            for turn in before["turns"]
            if turn["group"] in done
        ]
        measured = {arm for group in self.groups for arm in group["arms"]}
        self._settings["arms"] = {a: known[a] for a in known if a in measured} | arms

    def has(self, arms: list[str]) -> bool:
        return any(group["arms"] == arms for group in self.groups)

    def speed_ups(self) -> dict[str, Any]:
        of, known = self.scenario, {turn["arm"] for turn in self.turns}
        return {
            arm: pairs.compare(self.turns, arm, of.reference, of.warm_up)
            for arm in self._settings["arms"]
            if arm != of.reference and arm in known
        }

    def write(self) -> None:
        result = {
            "provenance": provenance(),
            "scenario": self._settings,
            "limits": {"waiting_cores": pairs.WAITING_CORES, "other_share": pairs.OTHER_SHARE},
            "speed_up": self.speed_ups(),
            "groups": self.groups,
        }
        steps.write(self.path, result, self.turns)


def command(scenario: Scenario, arm: str) -> list[str]:
    """Return the command of an arm's run, without its folder and gate."""
    settings = (*scenario.overrides, *scenario.arms[arm].overrides)
    return [
        *(sys.executable, "-m", "tlt", "train", str(ROOT / scenario.config)),
        *(f"run.num_steps={scenario.num_steps}", f"metrics.keep_samples={ALL_SAMPLES}"),
        *settings,
    ]


def run_group(comparison: Comparison, arms: list[str], runs_folder: Path) -> None:
    """Load the arms, let them take turns through all RL steps, and let them finish."""
    scenario = comparison.scenario
    group: dict[str, Any] = {
        "arms": arms,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": provenance()["command"],
        "complete": False,
    }
    number = len(comparison.groups)
    comparison.groups.append(group)
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    with ExitStack() as stack:
        gates = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tlt-gates-")))
        runs: list[Run] = []
        for place, arm in enumerate(arms):  # one after the other: less memory at the peak
            out = runs_folder / f"{number}-{arm}"
            run = Run(arm, command(scenario, arm), out, gates / f"{place}", environment)
            stack.callback(run.stop)
            run.wait_at_gate()
            runs.append(run)
        group["dtype"] = {run.arm: steps.dtype(run.out) for run in runs}
        loaded = Arms(runs)
        outs = {run.arm: run.out for run in runs}
        for step in range(1, scenario.num_steps + 1):
            for place, arm in enumerate(pairs.order(arms, step)):
                turn = {"group": number, "step": step, "arm": arm, "place": place}
                turn |= steps.rounded(loaded.turn(arm, step))
                comparison.turns.append(turn | steps.record(outs[arm], step))
            comparison.write()
            show(comparison, number, step)
        for run in runs:
            run.go()
        for run in runs:
            run.finish()
        group["policy"] = {run.arm: steps.policy(run.out) for run in runs}
        group["complete"] = True
        comparison.write()


def show(comparison: Comparison, group: int, step: int) -> None:
    """Print an RL step: seconds of each arm, with its marks."""
    cells = []
    for turn in comparison.turns:
        if turn["group"] == group and turn["step"] == step:
            why = f" ({', '.join(found)})" if (found := pairs.marks(turn)) else ""
            cells.append(f"{turn['arm']} {turn['end_to_end_s']:.2f} s{why}")
    print(f"{step:4}  {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--arms", default="", help="the reference, then others; default: all")
    parser.add_argument("--steps", type=int, help="RL steps that count")
    parser.add_argument("--at-once", type=int, default=2, help="arms in memory")
    parser.add_argument("--name", help="of the result; default: the scenario's")
    parser.add_argument("--anew", action="store_true", help="drop what the result file holds")
    options = parser.parse_args()
    arms = options.arms.split(",") if options.arms else []
    scenario = load(options.scenario, options.overrides, arms, options.steps)
    name = options.name or scenario.name
    comparison = Comparison(name, scenario, options.anew)
    runs_folder = ROOT / "runs" / "e2e" / name
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    os.chdir(ROOT)
    try:
        for group in pairs.groups(list(scenario.arms), scenario.reference, options.at_once):
            if not comparison.has(group):
                run_group(comparison, group, runs_folder)
    except RunEnded as error:
        sys.exit(str(error))
    finally:
        for arm, found in comparison.speed_ups().items():
            print(arm, {name: found[name] for name in pairs.MEASURES if name in found})


if __name__ == "__main__":
    main()
