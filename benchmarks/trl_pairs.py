"""TRL's GRPOTrainer with and without TLT: seconds of generation and rewards of every RL step.

    make setup-trl && source .venv-trl/bin/activate
    python benchmarks/trl_pairs.py [--pairs 2] [--steps 20] [--minutes 12]

Runs examples/trl_grpo.py in pairs, whose order alternates, on word problems, with the policy and
the drafter that benchmarks/words.sh makes. Both runs of a pair draw the same samples, so an RL step
of one run is compared with the same RL step of the other. Writes benchmarks/results/trl_pairs.json
after every pair, and begins no pair that would end after the given minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, parse_options, save

EXAMPLE = ROOT / "examples" / "trl_grpo.py"

Step = dict[str, float]


def steps_of(text: str) -> list[Step]:
    """Return the metrics of every RL step that the example printed."""
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    pairs = [re.findall(r"(\S+)=(\S+)", line) for line in lines]
    return [{name: float(value) for name, value in found} for found in pairs]


def run(arguments: list[str], without: bool) -> list[Step]:
    """Run the example in a process of its own, and return its RL steps."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(EXAMPLE), *arguments, "--out", out]
        command += ["--without"] * without
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return steps_of(done.stdout)


def main() -> None:
    from tlt.tasks.gym import problems

    options = parse_options(
        __doc__,
        model="models/smollm2-words",
        drafter="models/smollm2-words-eagle3",
        pairs=2,
        steps=20,
        minutes=12.0,
        busy=False,
    )
    questions = [problem.question for problem in problems("word_problems", 64, purpose="trl")]
    arguments = [options.model, "--drafter", options.drafter, "--steps", str(options.steps)]
    arguments += ["--ask", *questions]
    result: dict[str, Any] = {
        "model": Path(options.model).name,
        "drafter": Path(options.drafter).name,
        "busy": options.busy,
        "pairs": [],
    }
    started_s = time.monotonic()
    for number in range(options.pairs):
        passed_s = time.monotonic() - started_s
        if number and passed_s * (number + 1) / number > 60 * options.minutes:
            print(f"no time for pair {number + 1}: {passed_s:.0f} s have passed")
            break
        order = ["tlt", "without"] if number % 2 else ["without", "tlt"]
        pair = {name: run(arguments, name == "without") for name in order}
        result["pairs"].append({"first": order[0], **pair})
        save("trl_pairs", result)
        same = [s["reward"] for s in pair["without"]] == [s["reward"] for s in pair["tlt"]]
        print(f"pair {number + 1}: {'the same' if same else 'OTHER'} rewards", flush=True)


if __name__ == "__main__":
    main()
