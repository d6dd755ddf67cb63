"""Drafters of SmolLM2 with the norms of EAGLE-3.1 and without: equal time, and rollouts in turns.

    bash benchmarks/words.sh   # the policy: SmolLM2 after a supervised start on word problems
    python benchmarks/norms.py [--minutes 10] [--repeats 3]

Both drafters are trained at the same time, each on a core of its own, with the settings of
words.sh. Then `tlt drafter bench` takes turns: its rollouts have the same samples. What is trained
already is kept.

Writes benchmarks/results/norms.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, parse_options, ratios, save, spread

MODEL = "models/smollm2-words"
RUNS = ROOT / "runs" / "norms"
FORMS = ("without", "with")
PLAIN = """
from dataclasses import replace
from tlt.drafter.eagle3.config import Eagle3Config
of = Eagle3Config.for_target.__func__
Eagle3Config.for_target = classmethod(
    lambda cls, *args: replace(of(cls, *args), fc_norm=False, norm_output=False)
)
"""
"""Makes drafters as they were before they had these norms."""
COMMAND = "import sys; from tlt.cli.main import main; sys.exit(main())"


def train(form: str, core: int, minutes: float) -> subprocess.Popen[bytes]:
    """Start to train a drafter on one core."""
    code = (PLAIN if form == "without" else "") + COMMAND
    text = (
        f"drafter train --model {MODEL} --task word_problems --draft-vocab 4096 --draft-tokens 3 "
        f"--row-tokens 512 --num-samples 144 --num-held-out 12 --max-tokens 480 --dtype float32 "
        f"--engines 1 --budget-minutes {minutes:g} --out {RUNS / form}"
    )
    command = ["taskset", "-c", str(core), sys.executable, "-c", code, *text.split()]
    return subprocess.Popen(command, cwd=ROOT)


def rollout(form: str, repeat: int) -> Any:
    """Return the summary of one round of rollouts: without drafts, and with those of a drafter."""
    out = RUNS / f"rollout-{form}-{repeat}"
    text = (
        f"drafter bench --model {MODEL} --drafter {RUNS / form / 'drafter'} --task word_problems "
        f"--natural --longest 480 --requests 48 --engines 2 --repeats 1 --seed 1 "
        f"--engine-arg enforce_eager=true --mode off --mode eagle3:3 --out {out}"
    )
    command = [sys.executable, "-m", "tlt", *text.split()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "rollout.json").read_text())


def report(form: str) -> Any:
    found = json.loads((RUNS / form / "report.json").read_text())
    return {"acceptance": found["acceptance"]["after"], "training": found["training"]}


def main() -> None:
    options = parse_options(__doc__, minutes=10.0, repeats=3)
    waiting = [
        train(form, core, options.minutes)
        for core, form in enumerate(FORMS)
        if not Path(RUNS / form / "report.json").exists()
    ]
    if any(process.wait() for process in waiting):
        raise SystemExit("a drafter could not be trained")
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    off: list[float] = []
    length: dict[str, float] = {}
    for repeat in range(options.repeats):
        for form in FORMS:
            plain, drafted = rollout(form, repeat)["runs"]
            off.append(plain["wall_s"])
            seconds[form].append(drafted["wall_s"])
            length[form] = drafted["acceptance_length"]
            print(form, plain["wall_s"], drafted["wall_s"], length[form], flush=True)
    result = {
        "minutes": options.minutes,
        "drafters": {form: report(form) for form in FORMS},
        "tokens_per_draft": length,
        "off_s": off,
        "seconds": seconds,
        "gain": spread(ratios(seconds["without"], seconds["with"])),
        "against_off": {
            form: spread(ratios(off[place :: len(FORMS)], seconds[form]))
            for place, form in enumerate(FORMS)
        },
    }
    save("norms", result)


if __name__ == "__main__":
    main()
