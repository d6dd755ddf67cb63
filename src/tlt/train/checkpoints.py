"""Checkpoints of a run: what they hold, and when they are written.

The RL step waits only while the learner copies its state, or while the previous checkpoint is still
being written. The rest is written during the next RL step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path

from tlt.config.train import TrainConfig
from tlt.errors import CheckpointFailed
from tlt.harvest.contract import RunHarvest
from tlt.learner.group import LearnerGroup
from tlt.observe.stopwatch import Stopwatch
from tlt.train.folder import RunFolder

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long a run that must end waits for a checkpoint that is being written."""
MAX_IN_A_ROW = 3
"""Checkpoints that fail one after the other and end the run: without any, it trains for nothing."""


class Checkpoints:
    """Writes one checkpoint at a time: `begin`, then `end` when the RL step's record is on disk."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        learner: LearnerGroup,
        harvest: RunHarvest,
    ) -> None:
        self._config = config
        self._folder = folder
        self._learner = learner
        self._harvest = harvest
        self._begun: Path | None = None
        self._writing: asyncio.Task[None] | None = None
        self._faults = self._in_a_row = 0
        self.restarts_since = 0
        """Restarts of the learner since the last checkpoint was written."""

    def last(self, verify_again: bool = False) -> tuple[Path | None, int]:
        """Return the newest sound checkpoint and the number of RL steps it holds."""
        return self._folder.last_checkpoint(verify_again)

    def oldest(self) -> int:
        """Return the RL step from which a run may resume if all newer checkpoints are damaged."""
        return self._folder.oldest_checkpoint()

    async def begin(self, step: int, watch: Stopwatch) -> None:
        """Copy the learner's state if a checkpoint is due; raise the error of the last one."""
        if self._writing is not None and self._writing.done():
            await self.finish()
        last_step = step == self._config.run.num_steps
        if step % self._config.checkpoint.every_steps and not last_step:
            return
        watch.skip()
        await self.finish()
        self._begun = self._folder.begin_checkpoint(step)
        await self._learner.save(self._begun)
        watch.lap("checkpoint")

    def end(self, step: int, in_haste: bool = False) -> None:
        """Write the copy of `begin` during the next RL step; in haste, wait for no trainer."""
        if self._begun is not None:
            self._writing = asyncio.create_task(self._write(self._begun, step, in_haste))
            self._begun = None

    async def _write(self, hidden: Path, step: int, in_haste: bool) -> None:
        earlier, _ = self.last()
        try:
            await self._learner.wait_saved(hidden, earlier, step)
            await self._harvest.save(hidden / "drafter", to_resume=not in_haste)
            keep = self._config.checkpoint.keep
            await asyncio.to_thread(self._folder.publish_checkpoint, hidden, step, keep)
        except (CheckpointFailed, OSError) as error:
            await asyncio.to_thread(shutil.rmtree, hidden, ignore_errors=True)
            self._failed(step, earlier, error)
            return
        self.restarts_since = self._in_a_row = 0
        logger.info("the checkpoint of RL step %d is written", step)

    def _failed(self, step: int, earlier: Path | None, error: Exception) -> None:
        """Report a checkpoint that could not be written; end the run if it needs one."""
        self._faults += 1
        self._in_a_row += 1
        start = "its start" if earlier is None else earlier.name
        logger.error(
            "the checkpoint of RL step %d could not be written: %s; the run can resume from %s",
            *(step, error, start),
        )
        is_last = step == self._config.run.num_steps
        if is_last or self._in_a_row == MAX_IN_A_ROW:
            what = "the last checkpoint" if is_last else f"{self._in_a_row} checkpoints in a row"
            raise CheckpointFailed(
                f"{what} could not be written to {self._folder.path}: {error}; make room there, "
                f"and resume from {start} with --resume"
            ) from error

    def take_faults(self) -> int:
        """Return how many checkpoints could not be written since the last call."""
        faults, self._faults = self._faults, 0
        return faults

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written is visible."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def write_now(self, step: int) -> None:
        """Write a checkpoint of this RL step, which is done, unless there is one."""
        await self.finish()
        if step and self.last()[1] != step:
            self._begun = self._folder.begin_checkpoint(step)
            await self._learner.save(self._begun)
            self.end(step, in_haste=True)
            await self.finish()

    async def finish_in_time(self) -> None:
        """Finish within `GRACE_S` or give up; ignore errors."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GRACE_S):
                await self.finish()

    async def abandon(self) -> None:
        """Drop the checkpoint that the lost learner was writing, unless it is just visible."""
        self._begun = None
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
