"""What a run promises, with the settings of a new user: no drafter, full vocabulary, defaults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from commands import command, tlt
from speed import limit

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "tiny_tail_cpu.toml"
STEPS = 7
SETTINGS = (
    f"{RECIPE} tlt.enabled=true run.num_steps={STEPS} checkpoint.every_steps=1 "
    "engine.core_group=test-promises"
)
NO_GAP = 1e-5
"""Engines and learner in float32 differ by less, with the same weights."""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def published(run: Path) -> float:
    return sum(r.get("harvest/published", 0) for r in records(run))


@pytest.mark.gate
def test_harvest_publishes_the_run_is_killed_resumes_and_stays_on_policy(policy: Path) -> None:
    run = policy / "runs" / "promises"
    arguments = command(f"train {SETTINGS} run.out={run}")
    with (policy / "promises.log").open("w") as log:
        process = subprocess.Popen(arguments, cwd=policy, stdout=log, stderr=log)
        deadline_s = time.monotonic() + limit(400)
        while not (len(records(run)) >= 3 and published(run)):
            assert process.poll() is None, (policy / "promises.log").read_text()[-3000:]
            assert time.monotonic() < deadline_s, records(run)
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    tlt(f"train {SETTINGS} run.out={run} --resume", policy)
    found = records(run)
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    assert sum(r["harvest/published"] for r in found) >= 1
    assert max(r["drafter_version"] for r in found) >= 1
    assert max(r["learner/gap_mean"] for r in found) < NO_GAP
    for name in ("learner/gap_alarms", "rollout/policy_mismatches", "rollout/broken_samples"):
        assert sum(r[name] for r in found) == 0, name
    lengths = [json.loads(line) for line in (run / "lengths.jsonl").read_text().splitlines()]
    assert [len(each["tokens"]) for each in lengths] == [64] * STEPS
    report = json.loads(tlt(f"report {run} --json", policy))["runs"][0]
    assert report["num_steps"] == STEPS
    assert tlt(f"doctor --run {run}", policy)


@pytest.mark.parametrize("skipped", ["sharing", "sharing,fingerprint"])
def test_a_policy_that_drafter_swaps_change_is_caught(
    policy: Path, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sharing of equal heads, left in: every swap writes into the policy.

    The fingerprint finds it in the swap and mends it; without it, the gap does after the step.
    """
    monkeypatch.setenv("TLT_COMPAT_SKIP", skipped)
    run = policy / "runs" / f"caught-{skipped.replace(',', '-')}"
    tlt(f"train {SETTINGS} run.out={run}", policy)
    found = records(run)
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    first = next(r for r in found if r["drafter_version"])
    says = " ".join(tlt(f"doctor --run {run}", policy).split())
    if "fingerprint" in skipped:
        assert first["learner/gap_mean"] > NO_GAP
        assert first["learner/gap_alarms"] == 1
        assert says.startswith("In step"), says
        assert "engines and learner disagreed" in says
        assert sum(r["learner/gap_alarms"] for r in found if r["step"] < first["step"]) == 0
    else:
        assert first["rollout/policy_mismatches"] >= 1
        assert max(r["learner/gap_mean"] for r in found) < NO_GAP
        assert "engines held another policy than the learner's" in says
