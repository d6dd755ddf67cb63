"""What a run promises, with the settings of a new user: no drafter, full vocabulary, defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import records, tlt

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "tiny_tail_cpu.toml"
STEPS = 10
SETTINGS = f"{RECIPE} tlt.enabled=true run.num_steps={STEPS} debug.core_group=test-promises"
NO_GAP = 1e-5
"""Upper bound of the gap between engines and learner with equal float32 weights."""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


@pytest.mark.gate
def test_harvest_publishes_and_the_run_stays_on_its_policy(policy: Path) -> None:
    run = policy / "runs" / "promises"
    tlt(f"train {SETTINGS} run.out={run}", policy)
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
    """With vLLM's sharing of equal heads left in, every drafter swap writes into the policy.

    The fingerprint finds and repairs the policy during the swap. Without the fingerprint, the gap
    finds the damage after the RL step.
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
        assert "engines and learner disagreed" in says
        assert sum(r["learner/gap_alarms"] for r in found if r["step"] < first["step"]) == 0
    else:
        assert first["rollout/policy_mismatches"] >= 1
        assert max(r["learner/gap_mean"] for r in found) < NO_GAP
        assert "engines held another policy than the learner's" in says
