"""Checkpoints of a run: what they hold, and when they are written.

The RL step stands still only while the learner copies its state, or while the checkpoint before is
still being written. The rest is written beside the next RL step.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tlt.config.train import TrainConfig
from tlt.harvest.session import RunHarvest
from tlt.learner.group import LearnerGroup
from tlt.observe.stopwatch import Stopwatch
from tlt.run.folder import RunFolder

GRACE_S = 60.0
"""How long a run that must end waits for a checkpoint that is being written."""


class Checkpoints:
    """Writes one checkpoint at a time: `begin`, then `end` when the RL step's record is on disk."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, learner: LearnerGroup, harvest: RunHarvest
    ) -> None:
        self._config = config
        self._folder = folder
        self._learner = learner
        self._harvest = harvest
        self._begun: Path | None = None
        self._writing: asyncio.Task[None] | None = None
        self.restarts_since = 0
        """Restarts of the learner since the last checkpoint was written."""

    def last(self) -> tuple[Path | None, int]:
        """Return the newest checkpoint and the number of RL steps it holds."""
        return self._folder.last_checkpoint()

    async def begin(self, step: int, watch: Stopwatch) -> None:
        """Copy the learner's state if a checkpoint is due."""
        last_step = step == self._config.run.num_steps
        if step % self._config.checkpoint.every_steps and not last_step:
            return
        watch.skip()
        await self.finish()
        self._begun = self._folder.begin_checkpoint(step)
        await self._learner.save(self._begun)
        watch.lap("checkpoint")

    def end(self, step: int) -> None:
        """Write what `begin` copied, beside the next RL step."""
        if self._begun is not None:
            self._writing = asyncio.create_task(self._write(self._begun, step))
            self._begun = None

    async def _write(self, hidden: Path, step: int) -> None:
        earlier, _ = self.last()
        await self._learner.wait_saved(hidden, earlier, step)
        await self._harvest.save(hidden / "drafter", to_resume=True)
        keep = self._config.checkpoint.keep
        await asyncio.to_thread(self._folder.publish_checkpoint, hidden, step, keep)
        self.restarts_since = 0

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written is visible."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def finish_in_time(self) -> None:
        """Finish if that takes no longer than `GRACE_S`, whatever goes wrong."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GRACE_S):
                await self.finish()

    async def abandon(self) -> None:
        """Drop the checkpoint that the lost learner was writing, unless it is just visible."""
        self._begun = None
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
