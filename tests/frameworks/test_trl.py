"""TRL's own GRPOTrainer with TLT in it, in the environment of `make setup-trl`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
NUM_STEPS = 8

steps_of = importlib.import_module("trl_pairs").steps_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.two_cores]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_drafter_trains_and_rewards_stay_the_same(tmp_path: Path) -> None:
    run(["-m", "tlt", "models", "tiny", "--out", "tiny"], tmp_path)
    command = [str(EXAMPLE), "tiny", "--steps", str(NUM_STEPS)]
    drafted = steps_of(run([*command, "--out", "drafted"], tmp_path))
    plain = steps_of(run([*command, "--out", "plain", "--without"], tmp_path))
    assert len(drafted) == len(plain) == NUM_STEPS
    assert [step["reward"] for step in drafted] == [step["reward"] for step in plain]
    assert len({step["reward"] for step in plain}) > 1
    recorded = drafted[-1]["tlt/recorded_samples"]
    assert recorded > 8 * (NUM_STEPS - 1), "threads store samples, the last ones a moment later"
    assert any("tlt/acceptance_length" in step for step in drafted)
    assert not any("tlt/acceptance_length" in step for step in plain)
    versions = [step["tlt/drafter_version"] for step in drafted]
    assert versions[0] == 0
    assert versions[-1] >= 1, "no better drafter reached the engine"
    assert {step["tlt/drafter_version"] for step in plain} == {0}

    from tlt.drafter.checkpoint import load_drafter

    trained = load_drafter(tmp_path / "drafted" / "drafter")
    first = load_drafter(tmp_path / "drafted" / "drafter-start")
    assert not trained.fc.weight.equal(first.fc.weight)
