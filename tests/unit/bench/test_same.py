"""`tlt verify`: differences are found and judged, and the table and the exit code say so."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tlt.bench import same
from tlt.bench.same import Difference, Outcome, Plan
from tlt.cli.main import app
from tlt.contracts import EngineStats, SamplingSpec
from tlt.errors import ConfigError
from tlt.rollout.recheck import NEAR_TIES
from tlt.strategy.spec import build_strategy

PLAN = Plan("models/x", None, "float32", ((5, 6), (7,), (8,)), SamplingSpec(8), seed=0)
OFF = Outcome("off, 3 at a time", EngineStats(""), 2.0, ((1, 2, 3), (4, 5), (6, 7, 8, 9)))
THREE_TOKENS = torch.tensor([0.6, 0.3, 0.1]).log()


def drafted(tokens: tuple[tuple[int, ...], ...], accepted: int = 4) -> Outcome:
    stats = EngineStats("", drafts=5, draft_tokens=12, accepted_tokens=accepted)
    return Outcome("ngram:4", stats, 1.0, tokens)


def result(got: Outcome, dtype: str = "float32", apart: float | None = None) -> dict[str, Any]:
    """Return the result of plain decoding and one other mode."""
    found = same.first_difference(OFF, got)
    if found is not None and apart is not None:
        found = replace(found, apart=apart, near_tie=apart <= NEAR_TIES[dtype])
    return same.summary(replace(PLAN, dtype=dtype), [OFF, got], [None, found])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (OFF.tokens, None),
        (((1, 2, 3), (4, 0), (6, 7, 0, 9)), Difference(2, 2, 5, 0, num_samples=2)),
        (((1, 2, 3), (4, 5), (6, 7)), Difference(3, 3, 8, None, num_samples=1)),
        (((1, 2, 3, 9), (4, 5), (6, 7, 8, 9)), Difference(1, 4, None, 9, num_samples=1)),
    ],
)
def test_the_first_difference(
    tokens: tuple[tuple[int, ...], ...], expected: Difference | None
) -> None:
    assert same.first_difference(OFF, drafted(tokens)) == expected


def test_modes() -> None:
    for has_drafter in (False, True):
        found = same.modes(16, has_drafter)
        assert (found[0].strategy, found[0].drafts) == ({"kind": "off"}, False)
        assert found[0].at_a_time == 16 != found[1].at_a_time
        arms = {arm for mode in found for arm in build_strategy(mode.strategy).arms()}
        assert max(arm.num_draft_tokens for arm in arms) <= same.LONGEST_DRAFT
        assert ("eagle3" in {arm.drafter for arm in arms}) == has_drafter


def test_wrong_settings_are_refused_before_an_engine_starts() -> None:
    same.check(PLAN)
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        same.check(replace(PLAN, sampling=SamplingSpec(8, temperature=3)))


def test_every_sample_has_a_seed_of_its_own() -> None:
    found = same.requests(PLAN)
    assert len({request.sampling.seed for request in found}) == 3
    assert found == same.requests(PLAN)
    assert found != same.requests(replace(PLAN, seed=1))


# The draws of docs/lossless.md: seed 8 draws the second token, and seed 7 the first one by 0.02.


@pytest.mark.parametrize(("seed", "misses"), [(8, [0.66, 0.0, 2.76]), (7, [0.0, 1.20, 0.02])])
def test_by_how_much_a_token_misses_the_draw(seed: int, misses: list[float]) -> None:
    sampling = SamplingSpec(1, seed=seed)
    found = [same.missed(THREE_TOKENS, sampling, 0, token, 0.0) for token in range(3)]
    assert found == pytest.approx(misses, abs=0.006)


def test_a_token_outside_of_the_border_misses_by_far() -> None:
    narrow = SamplingSpec(1, top_k=1, seed=8)
    assert same.missed(THREE_TOKENS, narrow, 0, 0, 0.0) == 0.0
    assert same.missed(THREE_TOKENS, narrow, 0, 1, 0.0) == 0.0  # the first one outside
    assert same.missed(THREE_TOKENS, narrow, 0, 2, 0.0) == math.inf
    # Rounding may put the second token inside of top-p = 0.6, or leave it outside.
    border = SamplingSpec(1, top_p=0.6, seed=8)
    assert same.missed(THREE_TOKENS, border, 0, 1, 1e-3) == 0.0
    assert same.missed(THREE_TOKENS, replace(border, top_p=0.5), 0, 1, 1e-3) == math.inf


def test_greedy_tokens_miss_by_their_logits() -> None:
    greedy = SamplingSpec(1, temperature=0, seed=8)
    assert same.missed(THREE_TOKENS, greedy, 0, 1, 0.0) == pytest.approx(math.log(2))


def test_two_engines_share_a_gpu() -> None:
    """The engine that drafts is told all arms, whose CUDA graphs it captures."""
    from tlt.vllm.args import engine_args, graph_plan

    args = {"enforce_eager": None, "max_model_len": 4096}
    plan = replace(PLAN, drafter="drafter", num_gpus=2, engine_args=args)
    plain, drafting = (same.engine_config(plan, drafts) for drafts in (False, True))
    for engine in (plain, drafting):
        assert engine.num_gpus == 2
        assert engine.engine_args["gpu_memory_utilization"] < 0.5
        assert engine.engine_args["max_model_len"] == 4096
        assert engine_args(engine)["tensor_parallel_size"] == 2
    graphs = graph_plan(drafting)
    assert graphs is not None
    assert set(graphs.query_lens) <= {1, 2, 3, 4, 6, 9}
    assert 9 in graphs.query_lens


OTHER = ((1, 2, 3), (4, 0), (6, 7, 8, 9))


def test_the_verdict_says_what_is_lossless_and_what_to_do() -> None:
    early_end = ((1, 2, 3), (4,), (6, 7, 8, 9))
    assert result(drafted(OTHER), "bfloat16", apart=0.1)["lossless"]
    assert not result(drafted(OTHER), "bfloat16", apart=3.0)["lossless"]
    assert not result(drafted(early_end), "bfloat16")["lossless"]
    assert not result(drafted(OTHER), "bfloat16")["lossless"]
    assert "accepted 4 of 12" in result(drafted(OFF.tokens))["verdict"]
    assert "--max-tokens" in result(drafted(OFF.tokens, accepted=0))["verdict"]
    assert "VLLM_BATCH_INVARIANT=1" in result(drafted(OTHER), "bfloat16")["verdict"]


@pytest.mark.parametrize(
    ("found", "exit_code", "cell"),
    [
        (result(drafted(OFF.tokens)), 0, "yes"),
        (result(drafted(OTHER), apart=0.0002), 1, "no: sample 2, token 2, a near-tie"),
        (result(drafted(OTHER)), 1, "no: sample 2, token 2, not examined"),
    ],
)
def test_the_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: dict[str, Any],
    exit_code: int,
    cell: str,
) -> None:
    plans: list[Plan] = []

    def run(plan: Plan, show: Any) -> dict[str, Any]:
        plans.append(plan)
        return dict(found)

    monkeypatch.setattr(same, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(app, ["verify", "--samples", "3", "--top-k", "5"])
    assert done.exit_code == exit_code, done.output
    assert "a tiny random model" in done.output
    assert cell in done.output
    assert len(plans[0].prompts) == 3
    assert plans[0].sampling.top_k == 5
    printed = CliRunner().invoke(app, ["verify", "--samples", "3", "--json"])
    assert printed.exit_code == exit_code
    assert json.loads(printed.stdout)["modes"] == found["modes"]


def test_wrong_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.txt").write_text("What is 1 + 1?\n")
    done = CliRunner().invoke(app, ["verify", "--prompts", "few.txt"])
    assert "--samples" in str(done.exception)
