"""The picture of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import made_up_run

from tlt.report.plot import plot_run, smoothed


def test_smoothing() -> None:
    assert smoothed([], 3) == []
    assert smoothed([1, 2, 6], 3) == [1.5, 3, 4]


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_plot(tmp_path: Path, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    out = plot_run(made_up_run(num_steps), tmp_path / "run.png", "A run")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_plot_of_little(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_run([{"step": 1}], tmp_path / "bare.png", "A run")
    plot_run([{"step": 1, "learner/gap_mean": 0.01}], tmp_path / "gap.png", "A run")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_run([], tmp_path / "none.png", "A run")
