"""Rechecks in whole runs: a healthy run has none that fails, a broken sampler is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import records, tlt

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "tiny_tail_cpu.toml"
BROKEN = Path(__file__).parent / "broken_engine"
SETTINGS = (
    f"{RECIPE} tlt.enabled=true tlt.harvest=false run.num_steps=4 alarm.recheck_share=0.5 "
    "alarm.then=warn debug.core_group=test-recheck"
)

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_whose_engines_change_samples_says_so(
    policy: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        path = [str(BROKEN), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    run = policy / "runs" / f"recheck-{broken}"
    tlt(f"train {SETTINGS} run.out={run}", policy)
    found = records(run)
    assert sum(r["recheck/samples"] for r in found) >= 4
    faults = sum(r["recheck/faults"] for r in found)
    says = " ".join(tlt(f"doctor --run {run}", policy).split())
    assert bool(faults) == broken
    assert ("came out different" in says) == broken, says
