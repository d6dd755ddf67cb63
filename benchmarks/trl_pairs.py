"""TRL's GRPOTrainer with and without TLT: seconds of generation and rewards of every RL step.

    make setup-trl && source .venv-trl/bin/activate
    tlt models tiny --out models/tiny
    python benchmarks/trl_pairs.py [--model models/tiny] [--pairs 2] [--steps 20]

Runs examples/trl_grpo.py in pairs, whose order alternates. Both runs of a pair draw the same
samples, so an RL step of one run is compared with the same RL step of the other. Writes
benchmarks/results/trl_pairs.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
RESULT = Path(__file__).parent / "results" / "trl_pairs.json"

Step = dict[str, float | None]


def steps_of(text: str) -> list[Step]:
    """Return the metrics of every RL step that the example printed."""
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    pairs = [re.findall(r"(\S+)=(\S+)", line) for line in lines]
    return [{k: None if v == "None" else float(v) for k, v in found} for found in pairs]


def run(model: str, num_steps: int, without: bool) -> list[Step]:
    """Run the example in a process of its own, and return its RL steps."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(EXAMPLE), model, "--steps", str(num_steps), "--out", out]
        command += ["--without"] * without
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return steps_of(done.stdout)


def main() -> None:
    from tlt.observe.provenance import provenance

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="RL steps of a run")
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        order = [False, True] if number % 2 else [True, False]
        found = {without: run(options.model, options.steps, without) for without in order}
        pairs.append({"without": found[True], "tlt": found[False]})
        same = [s["reward"] for s in found[True]] == [s["reward"] for s in found[False]]
        print(f"pair {number + 1}: {'the same' if same else 'OTHER'} rewards", flush=True)
        result = {"provenance": provenance(), "model": Path(options.model).name, "pairs": pairs}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
