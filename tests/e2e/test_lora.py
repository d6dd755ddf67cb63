"""A run that trains adapters is the same run with TLT and after kills, in every bit."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from commands import ROOT, command, records, started, titled, tlt, wait_for_steps
from speed import limit

RUN = (
    f"train {ROOT / 'configs' / 'lora_tiny_cpu.toml'} run.num_steps=4 checkpoint.every_steps=1 "
    "sampling.prompts_per_step=8 sampling.group_size=4 learner.updates_per_step=2 "
    "algorithm.kl_weight=0.01 eval.every_steps=0 pool.max_restarts=20 learner.max_restarts=20 "
    "metrics.keep_samples=1000 debug.core_group=test-lora"
)
TLT = "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3"
SAME = (
    *("reward/mean", "reward/std", "rollout/output_tokens", "learner/loss", "learner/grad_norm"),
    *("learner/gap_mean", "learner/kl", "learner/tokens"),
)
FILES = ("model.safetensors", "adapter/adapter_model.safetensors")

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def test_with_tlt_and_kills_the_adapters_are_the_same(policy: Path) -> None:
    """A rank and the driver are killed; samples, updates and weights are those without."""
    off, on = (policy / "runs" / name for name in ("lora", "lora-tlt"))
    tlt(f"{RUN} run.out={off}", policy)
    words, log, rng = command(f"{RUN} {TLT} run.out={on}"), policy / "lora.log", random.Random(0)
    with started(words, policy, log) as process:
        wait_for_steps(1, on, process)
        children = psutil.Process(process.pid).children(recursive=True)
        titled(children, "ray::LearnerActor")[0].kill()
        wait_for_steps(2, on, process)
        time.sleep(rng.uniform(0, 1.5))  # anywhere in a step
        os.kill(process.pid, signal.SIGKILL)
    with started([*words, "--resume"], policy, log) as process:
        assert process.wait(timeout=limit(400)) == 0, log.read_text()[-3000:]
    without, with_tlt = records(off), records(on)
    assert [r["step"] for r in with_tlt] == [1, 2, 3, 4]
    for name in SAME:
        assert [r[name] for r in with_tlt] == [r[name] for r in without], name
    # Engines have the merged weights: in float32 they differ from the learner by rounding.
    assert max(r["learner/gap_mean"] for r in without) < 1e-5
    assert without[-1]["learner/kl"] > 0
    tlt(f"models export {on} --out {policy / 'lora-exported'}", policy)
    folders = [off / "policy", on / "policy", policy / "lora-exported"]
    for file in FILES:
        first, *others = (load_file(folder / file) for folder in folders)
        for other in others:
            assert all(other[name].equal(tensor) for name, tensor in first.items()), file
    start = load_file(policy / "models" / "tiny-sft" / FILES[0])
    trained = load_file(off / "policy" / FILES[0])
    moved = {name.split(".")[-2] for name in start if not start[name].equal(trained[name])}
    assert moved == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
