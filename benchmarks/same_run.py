"""Is a run with TLT the same run? The tiny recipe in several ways, compared bit for bit.

    python benchmarks/same_run.py [--steps 60] [--prompts 32] [--only off,tlt-2]

Every arm is `tlt train configs/tiny_gcd_cpu.toml` with the same seed: without and with TLT, on one
and on two engines, with drafters swapped, with engines killed in between, and with the whole run
killed and resumed. Each is compared with `off`, RL step by RL step: all samples, all metrics that
are neither times nor about drafts, and the final weights. Equal means equal in every bit.

A complete run is not repeated, so the arms can be run one by one (`--only`); delete runs/same to
start over. Makes models/tiny-sft if it is missing. Writes results/same_run.json. Two cores.
"""

from __future__ import annotations

import json
import random
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import ROOT, parse_options, save
from runs import Run, lasting, make_tiny_policy, samples_of, weights_of
from tlt.report.view import describe, look_at

CONFIG = ROOT / "configs" / "tiny_gcd_cpu.toml"
RECIPE = (
    "metrics.keep_samples=256 sampling.max_tokens=128 "
    "engine.engine_args={enforce_eager=true,max_model_len=256,max_num_seqs=128}"
)
"""The recipe with room for long responses: a tail gives a second engine time to train drafters."""
TLT = "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3"
"""TLT with short leases: these rollouts take seconds, and the default wants two of idle time."""
EAGLE3 = (
    "engine.strategy.kind=fixed engine.strategy.drafter=eagle3 engine.strategy.num_draft_tokens=2"
)
"""No n-grams, which leave little idle time: drafters are published and swapped during the run."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to make the run."""

    name: str
    text: str
    settings: str
    kills: str = ""
    """What is killed: `engine`, at two moments of the run, or `run`, once; then it is resumed."""


ARMS = (
    Arm("off", "off, one engine", "tlt.enabled=false pool.num_engines=1"),
    Arm("off-2", "off, two engines", "tlt.enabled=false pool.num_engines=2"),
    Arm("tlt-1", "TLT, one engine", f"{TLT} pool.num_engines=1"),
    Arm("tlt-2", "TLT, two engines", f"{TLT} pool.num_engines=2"),
    Arm("tlt-eagle3", "TLT, EAGLE-3 alone", f"{TLT} {EAGLE3} pool.num_engines=2"),
    Arm("tlt-engines-killed", "TLT, engines killed", f"{TLT} pool.num_engines=2", "engine"),
    Arm("tlt-resumed", "TLT, run killed and resumed", f"{TLT} pool.num_engines=2", "run"),
)


def run_of(arm: Arm, steps: int, prompts: int) -> Run:
    """Return the run of an arm, which may not have been made yet."""
    sizes = [f"run.num_steps={steps}", f"sampling.prompts_per_step={prompts}"]
    settings = shlex.split(f"{RECIPE} {arm.settings}")
    return Run(ROOT, f"same/{arm.name}-{steps}x{prompts}", CONFIG, *settings, *sizes)


def make(arm: Arm, run: Run, steps: int) -> None:
    """Make the arm's run, unless it is complete, and kill what is to be killed."""
    if is_complete(run):
        return
    rng = random.Random(arm.name)
    run.start()
    if arm.kills == "engine":
        for part in (1, 2):
            wait_for(lambda part=part: run.last_step() >= part * steps // 3, run)
            wait_for(lambda: len(run.processes("ray::EngineActor")) == 2, run)
            time.sleep(rng.uniform(0, 1))
            rng.choice(run.processes("ray::EngineActor")).kill()
    if arm.kills == "run":
        wait_for(lambda: run.last_step() >= steps // 2 + 3, run)
        time.sleep(rng.uniform(0, 1))
        run.end(signal.SIGKILL)
        run.start()
    run.wait()


def is_complete(run: Run) -> bool:
    return (run.folder / "summary.json").exists()


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    while not condition():
        assert run.driver() is not None, "the run ended early"
        time.sleep(0.05)


def compared(run: Run, reference: Run) -> dict[str, Any]:
    """Return how many samples were compared, and where the runs differ first."""
    mine, other = (
        {int(record["step"]): lasting(record) for record in each.records()}
        for each in (run, reference)
    )
    steps = sorted(mine.keys() | other.keys())
    lines = {step: samples_of(run, step) for step in steps}
    samples = [step for step in steps if lines[step] != samples_of(reference, step)]
    metrics = [step for step in steps if mine.get(step) != other.get(step)]
    every = [json.loads(line) for of in lines.values() for line in of]
    return {
        "samples": len(every),
        "tokens": sum(sample["num_tokens"] for sample in every),
        "metrics": sum(map(len, mine.values())),
        "first_differing_step": min([*samples, *metrics], default=None),
        "same_weights": weights_of(run) == weights_of(reference),
    }


def described(arm: Arm, run: Run) -> dict[str, Any]:
    found = describe(look_at(run.folder))
    drafts = found["arms"].values()
    return {
        "text": arm.text,
        "settings": arm.settings,
        "drafts": sum(each["drafts"] for each in drafts),
        "accepted_tokens": sum(each["accepted"] for each in drafts),
        "published": found["harvest"].get("published", 0),
    }


def main() -> None:
    options = parse_options(__doc__, steps=60, prompts=32, only=",".join(arm.name for arm in ARMS))
    runs = {arm.name: run_of(arm, options.steps, options.prompts) for arm in ARMS}
    make_tiny_policy(ROOT)
    for arm in ARMS:
        if arm.name in options.only.split(","):
            make(arm, runs[arm.name], options.steps)
    found = {}
    for arm in ARMS:
        if is_complete(runs[arm.name]):
            found[arm.name] = described(arm, runs[arm.name])
            if arm.name != "off" and "off" in found:
                found[arm.name]["against_off"] = compared(runs[arm.name], runs["off"])
            print(arm.text, found[arm.name].get("against_off", ""))
    if "off" in found and len(found) > 1:
        sizes = {"steps": options.steps, "prompts_per_step": options.prompts, "group_size": 8}
        save("same_run", {**sizes, "arms": found})


if __name__ == "__main__":
    main()
