"""The commands of the README, as a user types them."""

import json
from pathlib import Path

import pytest

from commands import tlt
from tlt.hardware import compute_dtype


@pytest.mark.vllm
def test_drafts_do_not_change_samples(tmp_path: Path) -> None:
    """The command of the page on losslessness, with the tiny model that it makes itself."""
    lines = [f"What is {number} + {number}?" for number in range(12)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    result = json.loads(
        tlt("verify --prompts prompts.txt --samples 12 --max-tokens 48 --json", tmp_path)
    )
    assert result["lossless"]
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
    tlt(
        "models sft --model models/tiny --out models/policy --num-problems 300 --steps 20 "
        "--lr 3e-3 --dtype float32",
        tmp_path,
    )
    tlt(
        "drafter train --model models/policy --out runs/drafter --num-samples 96 --num-held-out 8 "
        "--max-tokens 64 --steps 60 --draft-vocab 128 --lr 6e-3 --dtype float32 "
        "--ranks 2",
        tmp_path,
    )
    acceptance = json.loads((tmp_path / "runs/drafter/report.json").read_text())["acceptance"]
    assert acceptance["after"]["0"]["length"] > acceptance["before"]["0"]["length"] + 0.2
    tlt("drafter export runs/drafter --model models/policy --out models/policy-eagle3", tmp_path)
    provenance = json.loads((tmp_path / "models/policy-eagle3/provenance.json").read_text())
    assert provenance["measured"]["acceptance"] == acceptance

    modes = ["off", "ngram:4", "eagle3:2", "tail:4@4"]
    tlt(
        "drafter bench --model models/policy --drafter models/policy-eagle3 --repeats 1 "
        "--requests 24 --median 20 --p95 60 --longest 120 --out bench "
        f"--engine-arg dtype=float32 --mode {' --mode '.join(modes)}",
        tmp_path,
    )
    result = json.loads((tmp_path / "bench/rollout.json").read_text())
    assert [row["mode"] for row in result["summary"]] == modes
    assert all(run["curve"][-1][1] == 0 for run in result["runs"])
    assert result["summary"][2]["acceptance_length"]["median"] > 1.0
    assert (tmp_path / "bench/rollout.svg").stat().st_size > 2_000


@pytest.mark.parametrize(
    ("command", "named"),
    [
        pytest.param("models tiny --hidden-size 100", "128", marks=pytest.mark.gate),
        ("drafter train --model models/tiny --out x --prompts few.txt", "800"),
        ("drafter train --model models/tiny --out x --ranks 100", "--ranks"),
        ("drafter train --model models/tiny --out x --gpus 1", "Ray finds 0 GPUs"),
        ("drafter train --model models/tiny --out x --prompts bad.jsonl", "'prompt'"),
        ("drafter export x --model models/tiny --out y", "tlt drafter train"),
    ],
)
def test_wrong_input_is_refused_with_a_way_out(tmp_path: Path, command: str, named: str) -> None:
    tlt("models tiny", tmp_path)
    (tmp_path / "few.txt").write_text("What is 1 + 1?\nWhat is 2 + 2?\n")
    (tmp_path / "bad.jsonl").write_text('{"question": "What is 1 + 1?"}\n' * 800)
    said = tlt(command, tmp_path, code=2)
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert named in said


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.two_cores
@pytest.mark.slow
def test_the_demo_says_what_tlt_gains(tmp_path: Path) -> None:
    """Works in an empty folder; both runs generate the same samples."""
    found = json.loads(tlt("demo --steps 4 --json", tmp_path))
    assert found["gain"]["num_pairs"] == 3
    assert 0.2 < found["gain"]["step"]["median"] < 5
    assert found["drafts"]["ngram"]["accepted"] > 0
    assert found["samples"]["same"] == found["samples"]["compared"] == 4 * 64
    assert found["leases"]["training_s"] > 0
    demo = tmp_path / "runs" / "demo"
    assert 'href="tlt/timeline.json"' in (demo / "report.html").read_text()
    tlt(f"train {demo / 'demo.toml'} --check run.out=other", tmp_path)


@pytest.mark.vllm
def test_pass_at_k_of_a_model(tmp_path: Path) -> None:
    tlt("models tiny", tmp_path)
    arguments = "eval models/tiny --task gcd --problems 6 --samples 2 --max-tokens 16 --json"
    found = json.loads(tlt(arguments, tmp_path))
    assert list(found["pass_at"]) == ["1", "2"]
    assert found["num_problems"] == 6
    assert 0 < found["mean_tokens"] <= 16
    if compute_dtype() == "float32":  # in bfloat16 a near-tie may fall differently
        again = json.loads(tlt(arguments, tmp_path))
        assert again["mean_tokens"] == found["mean_tokens"]  # a seed of its own for every sample
