"""Dynamic sampling replaces the same groups whatever happens: the run stays equal in every bit."""

import json
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
    f"train {ROOT / 'configs' / 'dapo_tiny_cpu.toml'} run.num_steps=4 checkpoint.every_steps=1 "
    "sampling.prompts_per_step=4 sampling.max_extra_prompts=6 sampling.group_size=4 "
    "eval.every_steps=0 pool.max_restarts=20 learner.max_restarts=20 metrics.keep_samples=1000 "
    "debug.core_group=test-dapo"
)
TLT = "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3"
SAME = (
    *("reward/mean", "reward/std", "rollout/output_tokens", "response/mean_tokens"),
    *("rollout/replacement_share", "rollout/discarded_share", "rollout/missing_groups"),
    *("learner/loss", "learner/grad_norm", "learner/gap_mean", "learner/tokens"),
)

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def test_with_tlt_and_kills_the_same_groups_are_replaced(policy: Path) -> None:
    """An engine and the driver are killed; samples, updates and weights are those without."""
    off, on = (policy / "runs" / name for name in ("dapo", "dapo-tlt"))
    tlt(f"{RUN} run.out={off}", policy)
    words, log, rng = command(f"{RUN} {TLT} run.out={on}"), policy / "dapo.log", random.Random(0)
    with started(words, policy, log) as process:
        wait_for_steps(1, on, process)
        children = psutil.Process(process.pid).children(recursive=True)
        titled(children, "ray::EngineActor")[0].kill()
        wait_for_steps(2, on, process)
        time.sleep(rng.uniform(0, 1.5))  # anywhere in a step
        os.kill(process.pid, signal.SIGKILL)
    with started([*words, "--resume"], policy, log) as process:
        assert process.wait(timeout=limit(400)) == 0, log.read_text()[-3000:]
    without, with_tlt = records(off), records(on)
    assert [r["step"] for r in with_tlt] == [1, 2, 3, 4]
    for name in SAME:
        assert [r[name] for r in with_tlt] == [r[name] for r in without], name
    kept = [sorted((run / "samples").iterdir()) for run in (off, on)]
    assert len(kept[0]) == 4
    for one, other in zip(*kept, strict=True):
        assert other.read_text() == one.read_text(), one.name
    weights = [load_file(run / "policy" / "model.safetensors") for run in (off, on)]
    assert all(weights[0][name].equal(tensor) for name, tensor in weights[1].items())
    # There was something to replace, and to draft.
    assert max(r["rollout/replacement_share"] for r in without) > 0
    lengths = [json.loads(line) for line in (off / "lengths.jsonl").read_text().splitlines()]
    assert max(len(of["tokens"]) for of in lengths) > 16
    assert max(r["rollout/acceptance_length"] for r in with_tlt) > 1
