"""verl's GRPO on two CPU replicas with and without TLT: seconds of every RL step.

    make setup-verl && source .venv-verl/bin/activate
    tlt models tiny --out models/tiny
    python benchmarks/verl_steps.py [--model models/tiny] [--pairs 2] [--steps 10]

Runs examples/verl_grpo.py in pairs, whose order alternates. verl numbers no request, so the runs of
a pair draw different samples; the result has the tokens of every RL step, too. What verl needs to
run on CPU cores is in tests/frameworks/verl_on_cpu.py. Writes benchmarks/results/verl.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, parse_options, save

EXAMPLE = ROOT / "examples" / "verl_grpo.py"
PATCHES = ROOT / "tests" / "frameworks"

SAMPLES_PER_STEP = 16
LIMIT_S = 3000.0
"""Longest time of a run."""
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered for this name only
    "HF_HUB_OFFLINE": "1",
    "RAY_worker_niceness": "0",  # as in runs of TLT: trainers yield to engines
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ROLLOUT = "actor_rollout_ref.rollout"
ON_CPU = [
    *("trainer.device=cpu", "trainer.n_gpus_per_node=2"),
    *("+ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=16"),
    "+ray_kwargs.ray_init.include_dashboard=false",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    *("actor_rollout_ref.model.use_remove_padding=false", "data.filter_overlong_prompts=false"),
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    *("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_torch_compile=false"),
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    *(f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.max_num_seqs=16"),
    *(f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false"),
    *(f"{ROLLOUT}.max_model_len=640", f"{ROLLOUT}.agent.num_workers=1", "reward.num_workers=1"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={2**28}",
]
"""Settings of verl for two replicas on CPU cores."""
QUICK = ["+tlt.session_s=2", "+tlt.min_lease_s=0"]
"""Settings of harvest for RL steps of a few seconds."""
RECORDED = {
    "seconds": "timing_s/step",
    "generation_s": "timing_s/gen",
    "trained_s": "harvest/used_s",
    "idle_s": "tlt/replica_idle_s",
    "drafter": "tlt/drafter_version",
}
"""Metrics of an RL step in the result, and their names in verl's log."""

Step = dict[str, float]


def on_cpu() -> dict[str, str]:
    """Return an environment in which verl runs on CPU cores."""
    path = os.pathsep.join([str(PATCHES), os.environ.get("PYTHONPATH", "")])
    return dict(os.environ) | ENVIRONMENT | {"PYTHONPATH": path}


def run(model: Path, out: Path, num_steps: int, *more: str) -> list[Step]:
    """Run the example, and return what verl logged of every RL step."""
    out.mkdir(parents=True)
    log = out / "metrics.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLE), str(model), "--out", str(out), "--steps"),
            *(str(num_steps), *ON_CPU, "trainer.logger=[console,file]", *more),
        ],
        capture_output=True,
        text=True,
        env=on_cpu() | {"VERL_FILE_LOGGER_PATH": str(log)},
        timeout=LIMIT_S,
    )
    (out / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-8000:])
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def recorded(step: Step) -> Step:
    """Return what the result holds of an RL step."""
    found = {name: step[key] for name, key in RECORDED.items() if key in step}
    return found | {"tokens": step["response_length/mean"] * SAMPLES_PER_STEP}


def main() -> None:
    options = parse_options(__doc__, model=Path("models/tiny"), pairs=2, steps=10)
    pairs = []
    for number in range(options.pairs):
        found = {}
        for without in [False, True] if number % 2 else [True, False]:
            more = ["--without"] if without else QUICK
            with tempfile.TemporaryDirectory() as folder:
                steps = run(options.model.absolute(), Path(folder) / "run", options.steps, *more)
            found["without" if without else "tlt"] = [recorded(step) for step in steps]
            seconds = sum(step["timing_s/step"] for step in steps)
            print(f"pair {number + 1}, {'without' if without else 'with'} TLT: {seconds:.1f} s")
        pairs.append(found)
        save("verl", {"model": options.model.name, "pairs": pairs})


if __name__ == "__main__":
    main()
