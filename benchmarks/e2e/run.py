"""The same RL run with and without TLT, end to end.

    python benchmarks/e2e/run.py [--kind KIND] [--arms ...] [--repeats 3] [--steps 20]

Every run is a `tlt train` of its own; runs of a repeat follow each other, in another order each
time, over the same problems, and are compared with each other only. A run that is complete in
runs/e2e is not run again, nor a repeat that the results hold; `--anew` begins without them. Writes
results/e2e/<kind>.json and .png.

Kinds:
- tail: the regime of the field. 16 samples a step, median 30 tokens, longest 560, the same lengths
  in all arms: sums of 60 terms, the longest that policy and drafter know, each response cut off at
  its length. Speed is all that differs; the reward is a coin, the learning rate next to nothing.
- equal: 64 samples of 64 tokens: no tail to tame, little to win.
- moving: a reward for writing sevens and a learning rate at which the policy moves away from what
  the drafter was trained on; 32 samples a step, longest 450 tokens.

Arms:
- off: no speculation.
- static: the trained drafter, never changed, always 3 tokens.
- ngram: TLT without a draft model.
- tlt: everything. Starts with the same drafter as `static`.
- unpublished: as `tlt`, but engines are never told: what harvest costs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from picture import draw

from tlt.bench.metrics import spread
from tlt.observe.provenance import provenance
from tlt.observe.record import read

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results" / "e2e"

DRAFTER = 'engine.drafter="models/smollm2-eagle3"'
FIXED = 'engine.strategy={kind="fixed", drafter="eagle3", num_draft_tokens=3}'
ARMS = {
    "off": ["tlt.enabled=false"],
    "static": ["tlt.enabled=false", DRAFTER, FIXED],
    "ngram": ["tlt.enabled=true", "tlt.harvest=false"],
    "tlt": ["tlt.enabled=true", DRAFTER],
    "unpublished": ["tlt.enabled=true", "debug.publish_drafters=false", DRAFTER],
}
KINDS = {
    "tail": [
        "task.parameters={min_digits=1, max_digits=2, min_terms=60, max_terms=60}",
        "sampling.prompts_per_step=2",
        "debug.forced_lengths={median=30, p95=400, longest=560}",
        'reward.function="scores:coin"',
    ],
    "equal": [
        "task.parameters={min_digits=1, max_digits=2, min_terms=20, max_terms=20}",
        "sampling.prompts_per_step=8",
        "debug.forced_lengths={median=64, p95=64, longest=64}",
        'reward.function="scores:coin"',
    ],
    "moving": [
        "task.parameters={min_digits=1, max_digits=2, min_terms=40, max_terms=40}",
        "sampling.prompts_per_step=4",
        "debug.forced_lengths={median=30, p95=300, longest=450}",
        'reward.function="scores:sevens"',
        "learner.lr=1.5e-4",
        "learner.warmup_steps=5",
        "tlt.lr=3e-4",
    ],
}
Record = dict[str, float]


def run(arm: str, repeat: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run and its start: repeats compare runs that follow each other."""
    out = ROOT / "runs" / "e2e" / f"{options.kind}-{arm}-{repeat}"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        command = [str(options.tlt), "train", str(HERE / "run.toml"), f'run.out="{out}"']
        command += [f"run.num_steps={options.steps}", f"run.seed={repeat}", *ARMS[arm]]
        command += KINDS[options.kind]
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        started_s = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        print(f"{arm} {repeat}: {(time.monotonic() - started_s) / 60:.1f} minutes", flush=True)
    found = figures([record for record in read(out / "metrics.jsonl") if record["step"] > 0])
    began = json.loads((out / "versions.json").read_text())["starts"][0]["at"]
    return {"began": began} | found


def total(records: list[Record], name: str) -> float:
    return sum(record.get(name, 0.0) for record in records)


def figures(records: list[Record]) -> dict[str, Any]:
    """Return the figures of one run, in seconds over all its RL steps."""
    step_s, rollout_s = total(records, "time/step_s"), total(records, "time/rollout_s")
    found = {
        "step_s": step_s,
        "rollout_s": rollout_s,
        "update_s": total(records, "time/update_s"),
        "rollout_share": rollout_s / step_s,
        "output_tokens": total(records, "rollout/output_tokens"),
        "reward": statistics.fmean(record["reward/mean"] for record in records),
        "acceptance": [record["rollout/acceptance_length"] for record in records],
        "rewards": [record["reward/mean"] for record in records],
        "hits": [record.get("rollout/drafter_hit_share", 0.0) for record in records],
        "median_tokens": statistics.median(r["response/median_tokens"] for r in records),
        "longest_tokens": max(r["response/longest_tokens"] for r in records),
        "idle_share": statistics.median(r["rollout/idle_share"] for r in records),
    }
    if "harvest/used_s" in records[-1]:
        harvest = {
            name: total(records, f"harvest/{name}")
            for name in ("idle_s", "coverable_s", "used_s", "trained_tokens", "published", "faults")
        }
        harvest["stop_max_s"] = max(r.get("harvest/stop_max_s", 0.0) for r in records)
        harvest["length"] = [r.get("harvest/held_out_length", 0.0) for r in records]
        found["harvest"] = harvest
    return found


def compare(runs: dict[str, list[dict[str, Any]]], base: str) -> dict[str, Any]:
    """Return speed-ups over `base` within repeats, also per token, as lengths differ by chance."""
    result = {}
    for arm, found in runs.items():
        pairs = list(zip(runs[base], found, strict=False))
        result[arm] = {
            name: asdict(spread(ratios))
            for name, ratios in {
                "end_to_end": [a["step_s"] / b["step_s"] for a, b in pairs],
                "rollout": [a["rollout_s"] / b["rollout_s"] for a, b in pairs],
                "rollout_per_token": [
                    a["rollout_s"] / a["output_tokens"] * b["output_tokens"] / b["rollout_s"]
                    for a, b in pairs
                ],
            }.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", default="off,static,ngram,tlt")
    parser.add_argument("--kind", choices=KINDS, default="tail")
    parser.add_argument("--tlt", type=Path, default=Path(sys.executable).with_name("tlt"))
    options = parser.parse_args()
    arms = options.arms.split(",")
    path = RESULTS / f"{options.kind}.json"
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    left_out = None
    if path.exists() and not options.anew:
        before = json.loads(path.read_text())
        if before["steps"] == options.steps and list(before["runs"]) == arms:
            runs, left_out = before["runs"], before.get("left_out")
    for repeat in range(len(runs[arms[0]]), options.repeats):
        turn = repeat % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            runs[arm].append(run(arm, repeat, options))
        RESULTS.mkdir(parents=True, exist_ok=True)
        result = {
            "provenance": provenance(),
            "steps": options.steps,
            "repeats": repeat + 1,
            "left_out": left_out,  # written by hand: {"repeats": [0], "why": "..."}
            "speed_up": compare(runs, arms[0]),
            "runs": runs,
        }
        path.write_text(json.dumps(result, indent=2) + "\n")
        draw(options.kind, result, path.with_suffix(".png"))
    for arm, found in compare(runs, arms[0]).items():
        cells = [
            f"{name} {s['median']:.2f}x ({s['low']:.2f}-{s['high']:.2f})"
            for name, s in found.items()
        ]
        print(f"{arm:12} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
