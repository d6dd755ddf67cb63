"""When checkpoints are written, with a learner that writes nothing."""

import asyncio
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

pytest.importorskip("ray")

from tlt.errors import CheckpointFailed, ConfigError, LearnerLost
from tlt.harvest.contract import NoHarvest
from tlt.observe.stopwatch import Stopwatch
from tlt.train.checkpoints import Checkpoints
from tlt.train.folder import RunFolder
from tlt.train.manifest import verify


class FakeLearner:
    def __init__(self, on_disk: bool = True) -> None:
        self.on_disk = asyncio.Event()
        if on_disk:
            self.on_disk.set()
        self.lost = False
        self.fault: Exception | None = None
        self.earlier: list[str | None] = []

    async def save(self, folder: Path) -> None:
        assert folder.is_dir()

    async def wait_saved(self, folder: Path, earlier: Path | None, rl_step: int) -> None:
        self.earlier.append(earlier.name if earlier else None)
        await self.on_disk.wait()
        if self.lost:
            raise LearnerLost("gone")
        if self.fault:
            (folder / "half").write_text("half")
            raise self.fault


def names(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.checkpoints()]


def made(
    path: Path, on_disk: bool = True, num_steps: int = 5, every_steps: int = 2
) -> tuple[RunFolder, FakeLearner, Checkpoints]:
    folder, learner = RunFolder(path), FakeLearner(on_disk)
    config = small_run(
        run={"num_steps": num_steps}, checkpoint={"every_steps": every_steps, "keep": 2}
    )
    of_run: Any = learner
    return folder, learner, Checkpoints(config, folder, of_run, NoHarvest())


async def write_step(checkpoints: Checkpoints, step: int) -> None:
    await checkpoints.begin(step, Stopwatch())
    checkpoints.end(step)


async def test_checkpoints_are_written_beside_the_next_step(tmp_path: Path) -> None:
    folder, learner, checkpoints = made(tmp_path, on_disk=False)
    for step in (1, 2, 3):
        await write_step(checkpoints, step)
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
    folder, learner, checkpoints = made(tmp_path, on_disk=False)
    await write_step(checkpoints, 2)
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
    folder, learner, checkpoints = made(tmp_path)
    await write_step(checkpoints, 2)
    await checkpoints.finish_in_time()
    assert names(folder) == ["step-000002"]
    learner.lost = True
    await write_step(checkpoints, 4)
    await checkpoints.finish_in_time()  # says nothing: the run's own error counts


@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left on device"), CheckpointFailed("No space left")]
)
async def test_a_checkpoint_that_cannot_be_written_is_reported_at_once(
    tmp_path: Path, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, and can resume from the checkpoint before."""
    folder, learner, checkpoints = made(tmp_path, num_steps=9, every_steps=1)
    await write_step(checkpoints, 1)
    await checkpoints.finish()
    learner.fault = fault
    await write_step(checkpoints, 2)
    async with asyncio.timeout(5):
        while "checkpoint of RL step 2 could not be written" not in caplog.text:
            await asyncio.sleep(0.001)
    assert "No space left" in caplog.text
    learner.fault = None
    await checkpoints.begin(3, Stopwatch())
    assert names(folder) == ["step-000001"]
    assert checkpoints.take_faults() == 1
    assert checkpoints.take_faults() == 0
    checkpoints.end(3)
    await checkpoints.finish()
    assert names(folder) == ["step-000001", "step-000003"]
    hidden = [path.name for path in (tmp_path / "checkpoints").glob(".*")]
    assert hidden == [], "half a checkpoint takes no space"


async def test_checkpoints_that_fail_again_and_again_end_the_run(tmp_path: Path) -> None:
    _, learner, checkpoints = made(tmp_path, num_steps=9, every_steps=1)
    learner.fault = OSError(errno.ENOSPC, "No space left on device")
    for step in (1, 2, 3):
        await write_step(checkpoints, step)
    with pytest.raises(CheckpointFailed, match=r"3 checkpoints in a row.*No space left"):
        await checkpoints.finish()


async def test_a_last_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    _, learner, checkpoints = made(tmp_path, num_steps=4, every_steps=1)
    learner.fault = OSError(errno.ENOSPC, "No space left on device")
    await write_step(checkpoints, 4)
    with pytest.raises(CheckpointFailed, match="last checkpoint"):
        await checkpoints.finish()


async def test_a_learner_lost_in_a_checkpoint_is_noticed_in_the_next_step(tmp_path: Path) -> None:
    _, learner, checkpoints = made(tmp_path, on_disk=False)
    await write_step(checkpoints, 2)
    learner.lost = True
    learner.on_disk.set()
    await asyncio.sleep(0.01)
    with pytest.raises(LearnerLost):
        await checkpoints.begin(3, Stopwatch())  # which writes none itself


FILES = (
    *("learner/__0_0.distcp", "learner/.metadata", "drafter/model.safetensors"),
    *("drafter/version.json", "buffer-0/1-2-3-t-x.sample", "state.json"),
)


def write(folder: RunFolder, step: int, keep: int = 9) -> Path:
    hidden = folder.begin_checkpoint(step)
    (hidden / "learner").mkdir()
    (hidden / "drafter").mkdir()
    (hidden / "buffer-0").mkdir()
    for name in FILES[:-1]:
        (hidden / name).write_bytes(bytes(range(256)) * 40)
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "remove": Path.unlink,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        path = write(RunFolder(tmp_path), step)
    DAMAGES[how](path / name)
    found, step = RunFolder(tmp_path).last_checkpoint()
    assert name in caplog.text
    if name.startswith("buffer-"):
        assert (found, step) == (path, 20)
        assert not (path / name).exists(), "a damaged sample is not trained on"
        return
    assert found is not None
    assert (found.name, step) == ("step-000010", 10)
    assert names(RunFolder(tmp_path)) == ["step-000010"]
    assert (tmp_path / "checkpoints" / "step-000020.damaged").is_dir()


def test_without_a_sound_checkpoint_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write(RunFolder(tmp_path), 10)
    flip(path / "learner" / ".metadata")
    with pytest.raises(ConfigError, match=r"no checkpoint .* is sound.*learner/\.metadata"):
        RunFolder(tmp_path).last_checkpoint()
    assert path.is_dir()


def test_a_checkpoint_under_another_number_is_not_taken(tmp_path: Path) -> None:
    path = write(RunFolder(tmp_path), 10)
    shutil.copytree(path, path.with_name("step-000090"))
    assert RunFolder(tmp_path).last_checkpoint() == (path, 10)


def test_damage_that_comes_later_is_noticed_before_a_learner_restarts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first, second = write(folder, 10), write(folder, 20)
    flip(second / "learner" / "__0_0.distcp")
    assert folder.last_checkpoint() == (second, 20)
    assert folder.last_checkpoint(verify_again=True) == (first, 10)


def test_a_run_may_resume_from_the_oldest_checkpoint(tmp_path: Path) -> None:
    """What follows it is kept: newer ones may turn out damaged."""
    folder = RunFolder(tmp_path)
    assert folder.oldest_checkpoint() == 0
    write(folder, 10), write(folder, 20)
    assert folder.oldest_checkpoint() == 10


def test_the_policy_of_an_extended_run_stays_until_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.set_policy_aside()
    for content in ("first", "second"):
        (tmp_path / "policy").mkdir()
        (tmp_path / "policy" / "model.safetensors").write_text(content)
        folder.set_policy_aside()
        assert not (tmp_path / "policy").exists(), "a resumed run sees that it has to write one"
        folder.set_policy_aside()  # the run died and was resumed
        assert (tmp_path / "policy-before" / "model.safetensors").read_text() == content
    folder.forget_policy_before()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"[" * 5000, b"3", b"\xff", b'{"step": Infinity}'])
def test_a_list_that_cannot_be_read_is_damage(tmp_path: Path, content: bytes) -> None:
    path = write(RunFolder(tmp_path), 20)
    (path / "state.json").write_bytes(content)
    assert "state.json" in verify(path)[1]
