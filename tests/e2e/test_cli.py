"""The commands of the README, as a user types them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from speed import limit
from tlt.hardware import compute_dtype

TLT = [sys.executable, "-m", "tlt"]


def tlt(command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"COLUMNS": "160"}
    done = subprocess.run(
        [*TLT, *shlex.split(command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
        timeout=limit(600),
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.gate
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
def test_drafts_do_not_change_samples(tmp_path: Path) -> None:
    """The command of the page on losslessness, with the tiny model that it makes itself."""
    lines = [f"What is {number} + {number}?" for number in range(12)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    done = tlt("verify --prompts prompts.txt --samples 12 --max-tokens 48 --json", tmp_path)
    result = json.loads(done.stdout)
    assert result["lossless"]
    assert "Same samples" in result["verdict"]
    off, *others = result["modes"]
    assert [row["mode"] for row in others] == ["off, 3 at a time", "ngram:4", "random switching"]
    assert off["draft_tokens"] == 0
    for row in others[1:]:
        # Both outcomes of verification happen often.
        assert 10 < row["accepted_tokens"] < row["draft_tokens"] - 10
    assert not any(row["difference"] for row in result["modes"])


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.two_cores
def test_from_nothing_to_a_benchmark(tmp_path: Path) -> None:
    tlt("models tiny", tmp_path)
    assert (tmp_path / "models/tiny/config.json").exists()
    done = tlt(
        "sft --model models/tiny --out models/policy --num-problems 300 --steps 20 --lr 3e-3 "
        "--dtype float32",
        tmp_path,
    )
    assert "right tokens" in done.stdout
    done = tlt(
        "drafter train --model models/policy --out runs/drafter --num-samples 96 --num-held-out 8 "
        "--max-tokens 64 --budget-minutes 0.8 --draft-vocab 128 --lr 6e-3 --dtype float32",
        tmp_path,
    )
    assert "accept length" in done.stdout
    report = json.loads((tmp_path / "runs/drafter/report.json").read_text())
    acceptance = report["acceptance"]
    assert acceptance["after"]["0"]["length"] > acceptance["before"]["0"]["length"] + 0.2
    assert len(acceptance["after"]["1"]["by_position"]) == 4
    assert (tmp_path / "runs/drafter/report.svg").stat().st_size > 2_000
    done = tlt(
        "drafter export runs/drafter --model models/policy --out models/policy-eagle3", tmp_path
    )
    provenance = json.loads((tmp_path / "models/policy-eagle3/provenance.json").read_text())
    assert provenance["training"]["steps"] > 0
    assert provenance["measured"]["acceptance"] == acceptance

    done = tlt(
        "bench rollout --model models/policy --drafter models/policy-eagle3 --repeats 1 "
        "--requests 24 --median 20 --p95 60 --longest 120 --out bench "
        "--mode off --mode ngram:4 --mode eagle3:2 --mode tail:4@4 --engine-arg dtype=float32",
        tmp_path,
    )
    for heading in ("tokens/s", "accept length", "tail share", "idle s", "tail:4@4"):
        assert heading in done.stdout
    result = json.loads((tmp_path / "bench/rollout.json").read_text())
    assert result["engine_args"]["dtype"] == compute_dtype()
    assert [row["mode"] for row in result["summary"]] == ["off", "ngram:4", "eagle3:2", "tail:4@4"]
    assert len(result["runs"]) == 4
    assert all(run["curve"][-1][1] == 0 for run in result["runs"])
    eagle = result["summary"][2]
    assert eagle["acceptance_length"]["median"] > 1.0
    assert (tmp_path / "bench/rollout.svg").stat().st_size > 2_000


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("drafter train --model models/tiny --out x --task poetry", "known: chain_sum"),
        ("drafter train --model models/tiny --out x --prompts none.txt", "does not exist"),
        ("drafter train --model models/tiny --out x --prompts few.txt", "has 2 prompts, but 800"),
        ("drafter train --model models/tiny --out x --prompts bad.jsonl", "line 1: no 'prompt'"),
        ("drafter export x --model models/tiny --out y", "make one with `tlt drafter train`"),
        ("sft --model models/tiny --out x --task poetry", "known: chain_sum"),
    ],
)
def test_wrong_input_is_refused_with_a_way_out(tmp_path: Path, command: str, message: str) -> None:
    tlt("models tiny", tmp_path)
    (tmp_path / "few.txt").write_text("What is 1 + 1?\nWhat is 2 + 2?\n")
    (tmp_path / "bad.jsonl").write_text('{"question": "What is 1 + 1?"}\n' * 800)
    done = tlt(command, tmp_path, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert message in " ".join(done.stderr.split())


@pytest.mark.vllm
def test_bench_without_a_drafter_says_what_to_do(tmp_path: Path) -> None:
    tlt("models tiny", tmp_path)
    done = tlt("bench rollout --model models/tiny --mode eagle3:2", tmp_path, check=False)
    assert done.returncode == 2
    assert "tlt drafter train" in done.stderr
