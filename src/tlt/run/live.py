"""What a run does just now, in `live.json` of its folder, for `tlt watch`.

Made of what the driver knows anyway, so that looking costs the engines nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlt.contracts import ShowProgress
from tlt.harvest.forecast import TailForecast
from tlt.harvest.session import RunHarvest
from tlt.rollout.pool import RolloutPool
from tlt.spans import State

logger = logging.getLogger(__name__)

EVERY_S = 1.0
Record = dict[str, float]


class Live:
    """Use as a context: writes once a second, and removes the file in the end."""

    def __init__(self, path: Path, num_steps: int, pool: RolloutPool, harvest: RunHarvest) -> None:
        self._path = path
        self._num_steps = num_steps
        self._pool = pool
        self._harvest = harvest
        self._what, self._done, self._total = "starting", 0.0, 1.0
        self._since_s = time.time()
        self._record: Record = {}
        self._forecast = TailForecast()
        self._task: asyncio.Task[None] | None = None

    def showing(self, show: ShowProgress) -> ShowProgress:
        """The same, and noted here."""

        def noted(what: str, done: float, total: float) -> None:
            if what != self._what:
                self._forecast.ended()
                self._since_s = time.time()
                if _generating(what):
                    self._forecast.started(int(total), time.monotonic())
            if _generating(what) and done:
                self._forecast.finished(1, time.monotonic())
            self._what, self._done, self._total = what, done, total
            show(what, done, total)

        return noted

    def recording(self, on_record: Callable[[Record], None]) -> Callable[[Record], None]:
        def noted(record: Record) -> None:
            self._record = record
            on_record(record)

        return noted

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._write_often())

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._path.unlink()

    async def _write_often(self) -> None:
        while True:
            try:
                text = json.dumps(await self._now())
                hidden = self._path.with_name(f".{self._path.name}")
                hidden.write_text(text)
                hidden.rename(self._path)
            except Exception as error:
                logger.warning("%s cannot be written (%r): no live view", self._path, error)
                return
            await asyncio.sleep(EVERY_S)

    async def _now(self) -> dict[str, Any]:
        leased: list[str] = []
        if _generating(self._what):
            leased = self._harvest.leased()
        remaining_s = self._forecast.remaining_s(time.monotonic())
        return {
            "at_s": time.time(),
            "num_steps": self._num_steps,
            "what": self._what,
            "done": self._done,
            "total": self._total,
            "since_s": self._since_s,
            "remaining_s": remaining_s if remaining_s < float("inf") else None,
            "workers": {
                worker: {"state": self._state(worker, load, leased), "running": load or 0}
                for worker, load in self._pool.loads().items()
            },
            "record": self._record,
        }

    def _state(self, worker: str, load: int | None, leased: list[str]) -> State:
        if load is None:
            return "lost"
        if load:
            return "generating"
        if worker in leased:
            return "training"
        if "updating" in self._what:
            return "updating"
        return "idle" if _generating(self._what) else "waiting"


def _generating(what: str) -> bool:
    return what.endswith(": generating")
