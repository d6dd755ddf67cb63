"""What a run promises, with the settings of a new user: no drafter, full vocabulary, defaults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, TAIL, records, tlt

STEPS = 10
NO_GAP = 1e-5
"""Upper bound of the gap between engines and learner with equal float32 weights."""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def train(run: Path, policy: Path, settings: str = "") -> list[dict[str, Any]]:
    """Return the records of a run with TLT: every RL step once."""
    own = f"run.num_steps={STEPS} debug.core_group=test-promises {settings}"
    tlt(f"train {TAIL} run.out={run} tlt.enabled=true {own}", policy)
    found = records(run)
    assert [r["step"] for r in found] == list(range(1, len(found) + 1))
    return found


def doctor(run: Path) -> str:
    return " ".join(tlt(f"doctor --run {run}", run).split())


@pytest.mark.gate
def test_harvest_publishes_and_the_run_stays_on_its_policy(policy: Path) -> None:
    run = policy / "runs" / "promises"
    found = train(run, policy)
    assert sum(r["harvest/published"] for r in found) >= 1
    assert max(r["drafter_version"] for r in found) >= 1
    assert max(r["learner/gap_mean"] for r in found) < NO_GAP
    for name in ("learner/gap_alarms", "rollout/policy_mismatches", "rollout/broken_samples"):
        assert sum(r[name] for r in found) == 0, name
    lengths = [json.loads(line) for line in (run / "lengths.jsonl").read_text().splitlines()]
    assert [len(each["tokens"]) for each in lengths] == [64] * STEPS
    report = json.loads(tlt(f"report {run} --json", policy))["runs"][0]
    assert report["num_steps"] == STEPS
    assert doctor(run)


@pytest.mark.parametrize("skipped", ["sharing", "sharing,fingerprint"])
def test_a_policy_that_drafter_swaps_change_is_caught(
    policy: Path, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's sharing of equal heads left in, every drafter swap writes into the policy.

    The fingerprint finds and repairs the policy during the swap. Without the fingerprint, the gap
    finds the damage after the RL step.
    """
    monkeypatch.setenv("TLT_COMPAT_SKIP", skipped)
    run = policy / "runs" / f"caught-{skipped.replace(',', '-')}"
    found = train(run, policy)
    first = next(r for r in found if r["drafter_version"])
    if "fingerprint" in skipped:
        assert first["learner/gap_mean"] > NO_GAP
        assert first["learner/gap_alarms"] == 1
        assert "engines and learner disagreed" in doctor(run)
        assert sum(r["learner/gap_alarms"] for r in found if r["step"] < first["step"]) == 0
    else:
        assert first["rollout/policy_mismatches"] >= 1
        assert max(r["learner/gap_mean"] for r in found) < NO_GAP
        assert "engines held another policy than the learner's" in doctor(run)


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_whose_engines_change_samples_says_so(
    policy: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rechecks of a healthy run all pass."""
    if broken:
        tests = ROOT / "tests"
        path = [tests / "e2e" / "broken_engine", tests, os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(p) for p in path if p))
    run = policy / "runs" / f"recheck-{broken}"
    settings = "tlt.harvest=false run.num_steps=4 alarm.recheck_share=0.5 alarm.then=warn"
    found = train(run, policy, settings)
    assert sum(r["recheck/samples"] for r in found) >= 4
    assert bool(sum(r["recheck/faults"] for r in found)) == broken
    assert ("came out different" in doctor(run)) == broken
