"""The check of a whole run: `tlt train` with TLT on, for three RL steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from tlt.doctor.place import Place

NUM_STEPS = 3
SHOWN = ("learner/gap_mean", "rollout/acceptance_length", "time/rollout_s", "time/sync_s")
"""Metrics of the last RL step that the report shows."""


def settings(place: Place, out: Path, kind: str) -> dict[str, Any]:
    """Return the settings of a run on up to two GPUs, or on this machine's cores."""
    num_engines = 1 if kind == "separate" else min(2, place.num_gpus) or 1
    args: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}
    if place.num_gpus:
        args["gpu_memory_utilization"] = 0.3
    return {
        "run": {"out": str(out), "num_steps": NUM_STEPS},
        "policy": {
            "model": str(place.policy),
            "dtype": "bfloat16" if place.num_gpus else "float32",
        },
        "task": {"name": "gcd", "parameters": {"max_value": 9}},
        "reward": {"function": "exact"},
        "sampling": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 200},
        "engine": {
            "drafter": str(place.drafter),
            "num_gpus": place.engine_gpus,
            "kv_cache_gib": 0.25,
            "engine_args": args,
        },
        "pool": {"num_engines": num_engines},
        "learner": {
            "num_ranks": num_engines if place.num_gpus else 1,
            "num_gpus": place.engine_gpus,
            "row_tokens": 2048,
        },
        "placement": {"kind": kind},
        "tlt": {"enabled": True, "min_lease_s": 0.2, "session_s": 1.0},
        "debug": {
            "core_group": "doctor",
            "forced_lengths": {"median": 30, "p95": 100, "longest": 200},
        },
    }


def colocated(place: Place) -> dict[str, Any]:
    """Run engines and learner on the same devices, in turn."""
    return _train(place, "colocated")


def separate(place: Place) -> dict[str, Any]:
    """Run engine and learner on a GPU each."""
    return _train(place, "separate")


def _train(place: Place, kind: str) -> dict[str, Any]:
    """Run `tlt train`, and read what the run has measured."""
    out = Path(place.folder) / f"run-{kind}"
    recipe = out.with_suffix(".toml")
    recipe.write_text(tomli_w.dumps(settings(place, out, kind)))
    done = subprocess.run(
        [sys.executable, "-m", "tlt", "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"tlt train ended with code {done.returncode}\n{done.stdout[-8000:]}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "reward/mean" in record]
    if len(steps) != NUM_STEPS:
        raise AssertionError(f"{len(steps)} of {NUM_STEPS} RL steps are in metrics.jsonl")
    if restarts := steps[-1].get("rollout/engine_restarts", 0):
        raise AssertionError(f"{restarts} engines had to start again; see {out}/run.log")
    return {name: steps[-1][name] for name in SHOWN if name in steps[-1]}
