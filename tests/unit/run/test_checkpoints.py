"""When checkpoints are written, with a learner that writes nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from tlt.config.train import TrainConfig
from tlt.errors import LearnerLost
from tlt.harvest.session import NoHarvest
from tlt.observe.stopwatch import Stopwatch
from tlt.run.checkpoints import Checkpoints
from tlt.run.folder import RunFolder

CONFIG = TrainConfig.model_validate(
    {
        "run": {"out": "out", "num_steps": 5},
        "policy": {"model": "model"},
        "task": {"name": "gcd"},
        "sampling": {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8},
        "checkpoint": {"every_steps": 2, "keep": 2},
    }
)


class FakeLearner:
    def __init__(self) -> None:
        self.on_disk = asyncio.Event()
        self.lost = False
        self.earlier: list[str | None] = []

    async def save(self, folder: Path) -> None:
        assert folder.is_dir()

    async def wait_saved(self, folder: Path, earlier: Path | None, rl_step: int) -> None:
        self.earlier.append(earlier.name if earlier else None)
        await self.on_disk.wait()
        if self.lost:
            raise LearnerLost("gone")


def names(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.checkpoints()]


async def test_checkpoints_are_written_beside_the_next_step(tmp_path: Path) -> None:
    folder, learner = RunFolder(tmp_path), FakeLearner()
    of_run: Any = learner
    checkpoints = Checkpoints(CONFIG, folder, of_run, NoHarvest())
    for step in (1, 2, 3):
        await checkpoints.begin(step, Stopwatch())
        checkpoints.end(step)
    assert names(folder) == []
    checkpoints.restarts_since = 2
    learner.on_disk.set()
    for step in (4, 5):
        await checkpoints.begin(step, Stopwatch())  # waits for the one before
        assert checkpoints.restarts_since == 0
        checkpoints.end(step)
    await checkpoints.finish()
    assert names(folder) == ["step-000004", "step-000005"]
    assert checkpoints.last() == (folder.checkpoints()[-1], 5)
    assert learner.earlier == [None, "step-000002", "step-000004"]


async def test_a_checkpoint_of_a_lost_learner_does_not_become_visible(tmp_path: Path) -> None:
    folder, learner = RunFolder(tmp_path), FakeLearner()
    of_run: Any = learner
    checkpoints = Checkpoints(CONFIG, folder, of_run, NoHarvest())
    await checkpoints.begin(2, Stopwatch())
    checkpoints.end(2)
    learner.lost = True
    learner.on_disk.set()
    await checkpoints.abandon()
    await checkpoints.finish()
    assert names(folder) == []
    # One that was begun but not ended is dropped too.
    learner.lost = False
    await checkpoints.begin(4, Stopwatch())
    await checkpoints.abandon()
    checkpoints.end(4)
    await checkpoints.finish()
    assert names(folder) == []


async def test_a_run_that_ends_badly_still_finishes_its_checkpoint(tmp_path: Path) -> None:
    folder, learner = RunFolder(tmp_path), FakeLearner()
    of_run: Any = learner
    checkpoints = Checkpoints(CONFIG, folder, of_run, NoHarvest())
    learner.on_disk.set()
    await checkpoints.begin(2, Stopwatch())
    checkpoints.end(2)
    await checkpoints.finish_in_time()
    assert names(folder) == ["step-000002"]
    learner.lost = True
    await checkpoints.begin(4, Stopwatch())
    checkpoints.end(4)
    await checkpoints.finish_in_time()  # says nothing: the run's own error counts


def write(folder: RunFolder, step: int, keep: int = 9) -> Path:
    hidden = folder.begin_checkpoint(step)
    (hidden / "learner").mkdir()
    (hidden / "learner" / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    folder.publish_checkpoint(hidden, step, keep)
    return folder.path / "checkpoints" / f"step-{step:06d}"


def test_checkpoints_are_ordered_by_number_and_others_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (999_999, 1_000_000, 20):
        write(folder, step)
    for name in ("step-best", "step-000030.bak", "steps"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert names(folder) == ["step-000020", "step-999999", "step-1000000"]
    assert folder.last_checkpoint()[1] == 1_000_000
    write(folder, 1_000_001, keep=1)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-000030.bak", "step-1000001", "step-best", "steps"]
