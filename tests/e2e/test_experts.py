"""A mixture of experts learns by RL, and drafts change nothing of it: equal in every bit."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from commands import GCD, records, tlt

RUN = (
    f"train {GCD} run.num_steps=2 policy.model=models/experts sampling.prompts_per_step=4 "
    "sampling.group_size=4 sampling.max_tokens=48 reward.function=reward_of_experts:score "
    "learner.num_ranks=2 learner.gradient_checkpointing=true learner.lr=1e-3 "
    "checkpoint.every_steps=1 eval.every_steps=0 metrics.keep_samples=1000 "
    "debug.core_group=test-experts"
)
NGRAMS = (
    "engine.strategy.kind=fixed engine.strategy.drafter=ngram engine.strategy.num_draft_tokens=3 "
    "engine.ngram.min_match=1"
)
REWARD = "def score(problem, response):\n    return len(set(response)) / 100\n"
SAME = ("reward/mean", "response/mean_tokens", "learner/loss", "learner/grad_norm")

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def test_two_rl_steps_with_and_without_drafts(tmp_path: Path) -> None:
    (tmp_path / "reward_of_experts.py").write_text(REWARD)
    tlt("models tiny --out models/experts --experts 8 --layers 3 --hidden-size 64", tmp_path)
    runs = [tmp_path / "off", tmp_path / "ngrams"]
    for run, settings in zip(runs, ("engine.strategy.kind=off", NGRAMS), strict=True):
        tlt(f"{RUN} {settings} run.out={run}", tmp_path)
    without, with_drafts = (records(run) for run in runs)
    for name in SAME:
        assert [r[name] for r in with_drafts] == [r[name] for r in without], name
    assert all(r["learner/grad_norm"] > 0 and r["learner/gap_mean"] < 1e-4 for r in without)
    assert max(r["rollout/acceptance_length"] for r in with_drafts) > 1
    kept = [sorted((run / "samples").iterdir()) for run in runs]
    assert len(kept[0]) == 2
    for one, other in zip(*kept, strict=True):
        assert other.read_text() == one.read_text()
    first = load_file(tmp_path / "models" / "experts" / "model.safetensors")
    weights = [load_file(run / "policy" / "model.safetensors") for run in runs]
    assert set(weights[0]) == set(weights[1]) == set(first)
    assert all(weights[0][name].equal(tensor) for name, tensor in weights[1].items())
    gates = [name for name in first if ".mlp.gate." in name]
    assert gates
    assert all(not weights[0][name].equal(first[name]) for name in gates)
