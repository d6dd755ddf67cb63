"""An advantage and a loss of the user's own reach the update; wrong names are refused."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402

from tlt.config.train import AlgorithmConfig, LearnerConfig  # noqa: E402
from tlt.learner.advantage import advantage_function  # noqa: E402
from tlt.learner.batch import TrainSample, Weighting  # noqa: E402
from tlt.learner.rank import LearnerRank, RankSettings  # noqa: E402
from tlt.models import tiny  # noqa: E402

CODE = """
def advantage(rewards):
    return [2 * reward for reward in rewards]

def loss(logprob, old_logprob, advantage, settings):
    return (logprob - old_logprob) * 0 + 3 * advantage
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "algorithm_of_users.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_functions_of_users_reach_the_update(tmp_path: Path) -> None:
    (advantage,) = advantage_function("algorithm_of_users:advantage")([1.0])
    algorithm = AlgorithmConfig(loss="algorithm_of_users:loss", max_importance=0)
    model = tiny.make(tmp_path / "model", hidden_size=64, num_layers=3)
    settings = RankSettings(
        str(model), "float32", 1.0, Weighting("tokens", 64), algorithm, LearnerConfig()
    )
    rank = LearnerRank(settings, torch.device("cpu"))
    rank.accumulate([[TrainSample("a", 0, (5, 6), (7, 8, 9), (-1.0,) * 3, advantage)]])
    report = rank.step(denominator=3.0, max_gap=1e9)
    assert report.sums.loss == pytest.approx(3 * 2)
    assert report.grad_norm == 0.0
    assert 0 < report.sums.entropy < 3 * math.log(10_000), "of three tokens"


def test_a_rank_finds_the_code_in_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from tlt.learner.actor import LearnerActor

    monkeypatch.setattr(sys, "path", sys.path.copy())
    LearnerActor(cast(Any, None), 0, str(tmp_path / "driver"))
    assert str(tmp_path / "driver") in sys.path
