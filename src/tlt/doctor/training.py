"""The models of the checks, and the check of a whole run: `tlt train` for three RL steps."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from tlt.doctor.engines import Place
from tlt.models import tiny

if TYPE_CHECKING:
    from tlt.drafter.trainer import DrafterTrainer
    from tlt.states.captured import Captured

NUM_SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 128, 8, 96
ROW_SAMPLES, NUM_ROWS = 20, 60
"""Samples and number of the drafter's optimizer steps: the policy accepts many of its drafts."""
SHORT_SAMPLES, SHORT_ROWS = 4, 6
"""Samples and number of the optimizer steps on the device."""
NUM_STEPS = 3
SHOWN = (
    *("learner/gap_mean", "rollout/acceptance_length", "time/rollout_s", "time/sync_s"),
    *("harvest/enabled", "harvest/trained_tokens", "harvest/faults"),
)
"""Metrics of the last RL step that the report shows."""


def models(place: Place) -> dict[str, Any]:
    """A tiny random policy and a trained drafter are made on the CPU."""
    import torch

    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.passes import Row

    tiny.make(place.folder / "policy")
    trainer, samples = _trainer_and_samples(place, NUM_SAMPLES)
    rng = random.Random(0)
    for step in range(NUM_ROWS):
        row = Row(rng.sample(samples, ROW_SAMPLES))
        trainer.micro_step(row, lr_scale=1.0 - 0.9 * step / NUM_ROWS)
    save_drafter(trainer.drafter, place.folder / "drafter", torch.float32)
    return place.models


def _trainer_and_samples(
    place: Place, num_samples: int
) -> tuple[DrafterTrainer, Sequence[Captured]]:
    """Return the trainer of a new drafter on the CPU, and samples of the policy to learn from."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
    from tlt.states.captured import capture

    policy = AutoModelForCausalLM.from_pretrained(place.models["model"], dtype=torch.float32)
    torch.manual_seed(0)
    prompts = torch.randint(4, 260, (num_samples, PROMPT_TOKENS))
    sampling = {"do_sample": True, "temperature": 0.85, "pad_token_id": 0, "eos_token_id": None}
    texts = policy.generate(prompts, max_new_tokens=RESPONSE_TOKENS, **sampling).tolist()
    head = policy.get_output_embeddings().weight.detach()
    drafter = fresh_drafter(policy.config, head, None)
    layers = drafter.config.aux_layer_ids
    samples = [capture(policy, text, PROMPT_TOKENS, layers, torch.float32) for text in texts]
    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=2048, lr=6e-3, temperature=1.0, seed=0, bfloat16=False
    )
    embedding = policy.get_input_embeddings().weight.detach()
    return DrafterTrainer(drafter, head, embedding, settings), samples


def drafter_training(place: Place) -> dict[str, Any]:
    """A drafter learns on the device what it learns on the CPU, also after a stay on the host."""
    import torch

    from tlt.drafter.evaluation import evaluate_samples
    from tlt.drafter.passes import Row

    device = torch.device("cuda" if place.num_gpus else "cpu")
    losses, lengths, seconds = [], [], []
    for where in (torch.device("cpu"), device):
        trainer, samples = _trainer_and_samples(place, 2 * SHORT_SAMPLES)
        samples = [sample.to(where) for sample in samples]
        began_s, found = time.monotonic(), []
        for step in range(SHORT_ROWS):
            trainer.move(where)
            begin = step % 2 * SHORT_SAMPLES
            found.append(trainer.micro_step(Row(samples[begin : begin + SHORT_SAMPLES])))
            if where.type == "cuda" and step == SHORT_ROWS // 2:
                trainer.park()
        losses.append(torch.tensor(found))
        lengths.append(evaluate_samples(trainer.passes, samples, [1.0]).length(1.0))
        seconds.append(time.monotonic() - began_s)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lengths[1], lengths[0], rtol=0.02, atol=0.02)
    if not losses[1][-1] < losses[1][0]:
        raise AssertionError(f"the drafter did not learn: its losses are {losses[1].tolist()}")
    return {"losses": losses[1].tolist(), "lengths": lengths, "seconds": seconds}


def train(place: Place) -> dict[str, Any]:
    """`tlt train` runs three RL steps with TLT on, engines and learner on the same GPUs."""
    return _train(place, "colocated")


def train_separate(place: Place) -> dict[str, Any]:
    """`tlt train` runs three RL steps with TLT on, engine and learner on their own GPUs."""
    return _train(place, "separate")


def settings(place: Place, out: Path, kind: str) -> dict[str, Any]:
    """Return the settings of a run on up to two GPUs, or on this machine's cores."""
    on_gpus, num_gpus = place.num_gpus > 0, place.engine_gpus
    num_engines = 2 if place.num_gpus > 1 and kind == "colocated" else 1
    args: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}
    if on_gpus:
        args["gpu_memory_utilization"] = 0.3
    policy, drafter = place.models.values()
    return {
        "run": {"out": str(out), "num_steps": NUM_STEPS},
        "policy": {"model": policy, "dtype": "bfloat16" if on_gpus else "float32"},
        "task": {"name": "gcd", "parameters": {"max_value": 9}},
        "reward": {"function": "exact"},
        "sampling": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 200},
        "engine": {
            "drafter": drafter,
            "num_gpus": num_gpus,
            "kv_cache_gib": 0.25,
            "engine_args": args,
        },
        "pool": {"num_engines": num_engines},
        "learner": {"num_ranks": num_engines, "num_gpus": num_gpus, "row_tokens": 2048},
        "placement": {"kind": kind},
        "tlt": {"enabled": True, "min_lease_s": 0.2, "session_s": 1.0},
        "debug": {
            "core_group": "doctor",
            "forced_lengths": {"median": 30, "p95": 100, "longest": 200},
        },
    }


def _train(place: Place, kind: str) -> dict[str, Any]:
    """Run `tlt train`, and return what the run has measured."""
    # In the folder of this check, whose log files the report reads.
    out = Path(tempfile.gettempdir()) / f"tlt-run-{kind}"
    recipe = out.with_suffix(".toml")
    recipe.write_text(tomli_w.dumps(settings(place, out, kind)))
    done = subprocess.run([sys.executable, "-m", "tlt", "train", str(recipe)], check=False)
    if done.returncode:
        raise AssertionError(f"tlt train ended with code {done.returncode}: see what it printed")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "reward/mean" in record]
    if len(steps) != NUM_STEPS:
        raise AssertionError(f"{len(steps)} of {NUM_STEPS} RL steps are in metrics.jsonl")
    if restarts := steps[-1].get("rollout/engine_restarts", 0):
        raise AssertionError(f"{restarts} engines had to start again")
    return {name: steps[-1][name] for name in SHOWN if name in steps[-1]}
