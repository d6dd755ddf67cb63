"""The commands of the README, as a user types them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TLT = [sys.executable, "-m", "tlt"]


def tlt(command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"COLUMNS": "160"}
    done = subprocess.run(
        [*TLT, *shlex.split(command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_mistakes_are_one_line_and_not_a_traceback(tmp_path: Path) -> None:
    done = tlt("models tiny --hidden-size 100", tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: --hidden-size 100 is not a multiple of 64; e.g. 128"


@pytest.mark.vllm
def test_doctor(tmp_path: Path) -> None:
    done = tlt("doctor", tmp_path)
    assert "self-test passed: lossless" in done.stdout
    assert "rollouts with speculation can run here" in done.stdout


@pytest.mark.vllm
@pytest.mark.ray
def test_from_nothing_to_a_benchmark(tmp_path: Path) -> None:
    tlt("models tiny", tmp_path)
    assert (tmp_path / "models/tiny/config.json").exists()
    done = tlt(
        "drafter warmup --model models/tiny --out models/tiny-eagle3 --num-samples 96 "
        "--max-tokens 96 --dtype float32 --epochs 2 --lr 6e-3",
        tmp_path,
    )
    assert "agreement with the policy by position" in done.stdout

    done = tlt(
        "bench rollout --model models/tiny --drafter models/tiny-eagle3 --repeats 1 "
        "--requests 24 --median 20 --p95 60 --longest 120 --out bench "
        "--mode off --mode ngram:4 --mode eagle3:2 --mode tail:4@4 --engine-arg dtype=float32",
        tmp_path,
    )
    for heading in ("tokens/s", "accept length", "tail share", "idle s", "tail:4@4"):
        assert heading in done.stdout
    result = json.loads((tmp_path / "bench/rollout.json").read_text())
    assert [row["mode"] for row in result["summary"]] == ["off", "ngram:4", "eagle3:2", "tail:4@4"]
    assert len(result["runs"]) == 4
    assert all(run["curve"][-1][1] == 0 for run in result["runs"])
    eagle = result["summary"][2]
    assert eagle["acceptance_length"]["median"] > 1.0
    assert (tmp_path / "bench/rollout.png").stat().st_size > 5_000


@pytest.mark.vllm
def test_bench_without_a_drafter_says_what_to_do(tmp_path: Path) -> None:
    tlt("models tiny", tmp_path)
    done = tlt("bench rollout --model models/tiny --mode eagle3:2", tmp_path, check=False)
    assert done.returncode == 2
    assert "tlt drafter warmup" in done.stderr
