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

import argparse
import hashlib
import json
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tlt.observe.provenance import provenance
from tlt.observe.record import read
from tlt.report.view import describe, look_at

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "same_run.json"
RUNS = ROOT / "runs" / "same"
MODEL = (
    "models tiny --out models/tiny",
    "sft --model models/tiny --out models/tiny-sft --task gcd --sizes 2,2,2 "
    "--parameter max_value=9 --steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32",
)
RECIPE = (
    "configs/tiny_gcd_cpu.toml metrics.keep_samples=256 debug.core_group=same-run "
    "sampling.max_tokens=128 "
    "engine.engine_args={enforce_eager=true,max_model_len=256,max_num_seqs=128}"
)
"""The recipe with room for long responses: a tail gives a second engine time to train drafters."""
TLT = "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3"
"""TLT with short leases: these rollouts take seconds, and the default wants two of idle time."""
EAGLE3 = (
    "engine.strategy.kind=fixed engine.strategy.drafter=eagle3 engine.strategy.num_draft_tokens=2"
)
"""No n-grams, which leave little idle time: drafters are published and swapped during the run."""

SAME = ("step", "policy_version", "reward/", "prompt/", "response/", "eval/", "learner/")
"""Beginnings of the metrics that must be equal, with `rollout/output_tokens`."""
NOT_SAME = ("learner/tokens_per_s", "learner/restarts")

Run = subprocess.Popen[bytes]


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


# --- runs ---------------------------------------------------------------------------------------


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "tlt", *shlex.split(arguments)]


def make_model() -> None:
    if not (ROOT / "models" / "tiny-sft" / "model.safetensors").exists():
        for arguments in MODEL:
            subprocess.run(command(arguments), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def make_run(arm: Arm, out: Path, steps: int, prompts: int) -> None:
    """Make the arm's run unless it is complete."""
    if (out / "summary.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    arguments = f"train {RECIPE} run.out={out} run.num_steps={steps} "
    arguments += f"sampling.prompts_per_step={prompts} {arm.settings}"
    rng = random.Random(arm.name)
    with out.with_suffix(".log").open("wb") as log:

        def start(flags: str = "") -> Run:
            return subprocess.Popen(command(arguments + flags), cwd=ROOT, stdout=log, stderr=log)

        run = start()
        if arm.kills == "engine":
            for part in (1, 2):
                wait_for(lambda part=part: num_steps(out) >= part * steps // 3, run)
                wait_for(lambda: len(engines(run)) == 2, run)
                time.sleep(rng.uniform(0, 1))
                rng.choice(engines(run)).kill()
        if arm.kills == "run":
            wait_for(lambda: num_steps(out) >= steps // 2 + 3, run)
            time.sleep(rng.uniform(0, 1))
            run.kill()
            run.wait()
            run = start(" --resume")
        if run.wait():
            raise SystemExit(f"the run of {arm.name} failed; see {log.name}")


def num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return int(read(path)[-1]["step"]) if path.exists() and path.read_bytes() else 0


def engines(run: Run) -> list[psutil.Process]:
    """Return the processes of the run's engines."""
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        try:
            if "ray::EngineActor" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    while not condition():
        assert run.poll() is None, "the run ended early"
        time.sleep(0.05)


# --- comparison ---------------------------------------------------------------------------------


def steps_of(out: Path) -> dict[int, tuple[Any, dict[str, float]]]:
    """Return the samples and the metrics of every RL step that must be equal."""
    found = {}
    for record in read(out / "metrics.jsonl"):
        step = int(record["step"])
        file = out / "samples" / f"step-{step:06d}.jsonl"
        samples = file.read_text().splitlines() if file.exists() else []
        metrics = {
            name: value
            for name, value in record.items()
            if name == "rollout/output_tokens" or (name.startswith(SAME) and name not in NOT_SAME)
        }
        found[step] = (samples, metrics)
    return found


def compared(out: Path, reference: Path) -> dict[str, Any]:
    """Return how many samples were compared, and where the runs differ first."""
    mine, other = steps_of(out), steps_of(reference)
    steps = sorted(mine.keys() | other.keys())
    first: dict[str, int | None] = {"samples": None, "metrics": None}
    names: list[str] = []
    samples = tokens = 0
    for step in steps:
        pair = mine.get(step, ([], {})), other.get(step, ([], {}))
        samples += len(pair[0][0])
        tokens += sum(json.loads(line)["num_tokens"] for line in pair[0][0])
        if first["samples"] is None and pair[0][0] != pair[1][0]:
            first["samples"] = step
        if first["metrics"] is None and pair[0][1] != pair[1][1]:
            first["metrics"] = step
            keys = pair[0][1].keys() | pair[1][1].keys()
            names = sorted(k for k in keys if pair[0][1].get(k) != pair[1][1].get(k))
    differing = [step for step in first.values() if step is not None]
    return {
        "samples": samples,
        "tokens": tokens,
        "metrics": sum(len(metrics) for _, metrics in mine.values()),
        "first_differing_step": min(differing, default=None),
        "first_differing_samples": first["samples"],
        "first_differing_metrics": {"step": first["metrics"], "names": names} if names else None,
        "same_weights": weights_of(out) == weights_of(reference),
    }


def weights_of(out: Path) -> str:
    """Return a digest of the final weights, name by name and bit by bit."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(out / "policy" / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
            digest.update(file.get_tensor(name).numpy().tobytes())
    return digest.hexdigest()


def described(arm: Arm, out: Path) -> dict[str, Any]:
    view = look_at(out)
    found = describe(view)
    drafts = found["arms"].values()
    return {
        "text": arm.text,
        "settings": arm.settings,
        "weights": weights_of(out),
        "rollout_s": sum(r["time/rollout_s"] for r in view.records),
        "drafts": sum(each["drafts"] for each in drafts),
        "accepted_tokens": sum(each["accepted"] for each in drafts),
        "drafters": len(found["drafters"]),
        "published": found["harvest"].get("published", 0),
        "engine_restarts": sum(r["rollout/engine_restarts"] for r in view.records),
        "reward": found["reward"],
    }


def table(arms: dict[str, dict[str, Any]]) -> str:
    columns = ("", "rollout s", "drafts", "accepted", "drafters", "samples", "tokens", "differs")
    rows = [columns]
    for of in arms.values():
        against = of.get("against_off")
        step = "the run to compare with"
        if against is not None:
            step = str(against["first_differing_step"] or "nowhere")
            step = step if against["same_weights"] else f"{step}, weights"
        rows.append(
            (
                of["text"],
                f"{of['rollout_s']:.0f}",
                f"{of['drafts']:,.0f}",
                f"{of['accepted_tokens']:,.0f}",
                f"{of['published']:.0f}",
                f"{against['samples']:,}" if against else "",
                f"{against['tokens']:,}" if against else "",
                step,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--only", default=",".join(arm.name for arm in ARMS))
    options = parser.parse_args()
    size = f"{options.steps}x{options.prompts}"
    outs = {arm.name: RUNS / f"{arm.name}-{size}" for arm in ARMS}
    make_model()
    for arm in ARMS:
        if arm.name in options.only.split(","):
            make_run(arm, outs[arm.name], options.steps, options.prompts)
    found = {}
    for arm in ARMS:
        if (outs[arm.name] / "summary.json").exists():
            found[arm.name] = described(arm, outs[arm.name])
            if arm.name != "off" and "off" in found:
                found[arm.name]["against_off"] = compared(outs[arm.name], outs["off"])
    sys.stdout.write(table(found) + "\n")
    if "off" in found and len(found) > 1:
        sizes = {"steps": options.steps, "prompts_per_step": options.prompts, "group_size": 8}
        result = {**sizes, "arms": found, "provenance": provenance()}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
