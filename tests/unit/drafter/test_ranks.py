"""Rows of one optimizer step, and the ranks that share them."""

from dataclasses import replace

import pytest
import torch
from drafter_fixtures import SETTINGS, captured, drafter, trainer_of

from tlt.drafter.passes import Row
from tlt.errors import ConfigError
from tlt.offline.training import plan_ranks


def test_a_step_of_several_rows_learns_the_mean_of_their_losses() -> None:
    rows = [Row([captured(30, 3, seed=seed)]) for seed in (1, 2)]
    one = trainer_of(drafter(), replace(SETTINGS, num_rows=2))
    torch.stack([one.loss(row) for row in rows]).mean().backward()
    expected = [parameter.grad for parameter in one.drafter.parameters()]
    norm = torch.nn.utils.get_total_norm([g for g in expected if g is not None])
    other = trainer_of(drafter(), replace(SETTINGS, num_rows=2))
    loss = other.micro_step(*rows)
    assert loss == pytest.approx(sum(one.loss(row).item() for row in rows) / 2)
    for parameter, gradient in zip(other.drafter.parameters(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient / max(1.0, norm.item()))


@pytest.mark.parametrize(
    ("asked", "planned"),
    [
        ((None, None, 2, 0, 8), (1, 1)),
        ((2, None, 2, 0, 8), (2, 2)),
        ((None, None, 4, 2, 1), (8, 8)),
        ((2, 8, 4, 1, 1), (2, 8)),
    ],
)
def test_ranks_take_the_gpus_of_all_engines_or_one_process(
    asked: tuple[int | None, int | None, int, int, int], planned: tuple[int, int]
) -> None:
    assert plan_ranks(*asked) == planned


@pytest.mark.parametrize(
    ("asked", "way_out"),
    [
        ((3, None, 1, 0, 2), "2 cores.*--ranks 2 or less$"),
        ((5, None, 2, 2, 64), "4 GPUs of the engines.*--ranks 4 or less, or raise --engines"),
        ((2, 5, 1, 0, 2), "--rows 5 .* 2 ranks; e.g. --rows 6"),
    ],
)
def test_ranks_without_a_place_are_refused(
    asked: tuple[int | None, int | None, int, int, int], way_out: str
) -> None:
    with pytest.raises(ConfigError, match=way_out):
        plan_ranks(*asked)
