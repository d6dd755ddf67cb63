"""What a run is doing now, for its terminal and for `tlt watch` (`live.json` in its folder).

The driver already knows everything shown, so the live view costs the engines nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tlt.contracts import ShowProgress
from tlt.errors import ConfigError
from tlt.spans import State

logger = logging.getLogger(__name__)

EVERY_S = 1.0
AFTER_ROLLOUT = ("reward_wait", "update", "sync", "other")
"""Stages of every RL step after its rollout."""
NUM_STEPS = 5
"""RL steps that the forecast of a step's end is the median of."""


class Activity(StrEnum):
    """The training loop's activities, in the words that users see."""

    STARTING = "starting"
    GENERATING = "generating"
    UPDATING = "updating the policy"
    RESTARTING_LEARNER = "starting the learner again"


class WorkerNow(BaseModel):
    """A worker's state, and how many requests it runs."""

    state: str
    running: int = Field(ge=0)


class Now(BaseModel):
    """The contents of `live.json`, as readers check them."""

    model_config = ConfigDict(allow_inf_nan=False)

    at_s: float
    num_steps: int
    what: str
    done: float
    total: float
    since_s: float
    remaining_s: float | None
    workers: dict[str, WorkerNow]
    record: dict[str, Annotated[float, Field(allow_inf_nan=True)]]


def step_remaining_s(now: Now, records: Sequence[Mapping[str, float]]) -> float | None:
    """Return the seconds to the end of the RL step, estimated from the last ones; None if unknown.

    Checkpoints and evaluations, which only some RL steps have, are not counted.
    """
    if not now.what.startswith("step ") or now.what.startswith("step eval"):
        return None
    after = [
        sum(record.get(f"time/{stage}_s", 0.0) for stage in AFTER_ROLLOUT)
        for record in records[-NUM_STEPS:]
        if record.get("time/update_s", 0.0) > 0
    ]
    if not after:
        return None
    if now.what.endswith(Activity.GENERATING):
        return None if now.remaining_s is None else now.remaining_s + median(after)
    return max(0.0, median(after) - (now.at_s - now.since_s))


def read_live(path: Path) -> Now | None:
    """Read `live.json`; None if there is none."""
    try:
        return Now.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path} is damaged ({where}: {first['msg']}); a running run writes it again every "
            "second, and `tlt report` shows one that has ended"
        ) from error


class Engines(Protocol):
    """The pool, as far as it knows how busy its engines are."""

    def loads(self) -> Mapping[str, int | None]: ...


class Leases(Protocol):
    """Harvest, as far as it knows which workers train."""

    def leased(self) -> Collection[str]: ...


class Forecast(Protocol):
    """The seconds that a rollout will still take, from when its samples ended."""

    def started(self, num_samples: int, now_s: float) -> None: ...
    def grew(self, num_samples: int) -> None: ...
    def finished(self, num_samples: int, now_s: float) -> None: ...
    def ended(self) -> None: ...
    def remaining_s(self, now_s: float) -> float: ...


class Live:
    """Writes `live.json` once a second while it is entered, and removes the file at the end."""

    def __init__(
        self,
        path: Path,
        num_steps: int,
        engines: Engines,
        leases: Leases,
        forecast: Forecast,
        show: ShowProgress,
        at_tools: Callable[[str], bool] = lambda worker: False,
    ) -> None:
        """`at_tools` says whether a worker's samples wait for tools."""
        self._path = path
        self._num_steps = num_steps
        self._engines = engines
        self._leases = leases
        self._forecast = forecast
        self._show = show
        self._at_tools = at_tools
        self._activity = Activity.STARTING
        self._what, self._done, self._total = str(self._activity), 0.0, 1.0
        self._since_s = time.time()
        self._task: asyncio.Task[None] | None = None
        self.record: dict[str, float] = {}
        """The record of the last RL step."""

    def doing(self, activity: Activity, done: float, total: float, step: int | str = "") -> None:
        """Note the loop's activity, its RL step or evaluation, and its progress."""
        what = f"step {step}: {activity}" if step else str(activity)
        generating = activity is Activity.GENERATING
        if what != self._what:
            self._forecast.ended()
            self._since_s = time.time()
            if generating:
                self._forecast.started(int(total), time.monotonic())
        elif generating and total > self._total:
            self._forecast.grew(int(total - self._total))
        if generating and done:
            self._forecast.finished(1, time.monotonic())
        self._activity, self._what, self._done, self._total = activity, what, done, total
        self._show(what, done, total)

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
                text = json.dumps(self.now())
                hidden = self._path.with_name(f".{self._path.name}")
                hidden.write_text(text)
                hidden.rename(self._path)
            except Exception as error:
                logger.warning("%s cannot be written (%r): no live view", self._path, error)
                return
            await asyncio.sleep(EVERY_S)

    def now(self) -> dict[str, Any]:
        """Return what `live.json` holds."""
        generating = self._activity is Activity.GENERATING
        leased = self._leases.leased() if generating else []
        remaining_s = self._forecast.remaining_s(time.monotonic())
        return {
            "at_s": time.time(),
            "num_steps": self._num_steps,
            "what": self._what,
            "done": self._done,
            "total": self._total,
            "since_s": self._since_s,
            "remaining_s": remaining_s if generating and remaining_s < float("inf") else None,
            "workers": {
                worker: {"state": self._state(worker, load, worker in leased), "running": load or 0}
                for worker, load in self._engines.loads().items()
            },
            "record": self.record,
        }

    def _state(self, worker: str, load: int | None, leased: bool) -> State:
        if load is None:
            return "lost"
        if load:
            return "generating"
        if leased:
            return "training"
        if self._activity is Activity.UPDATING:
            return "updating"
        if self._at_tools(worker):
            return "tools"
        return "idle" if self._activity is Activity.GENERATING else "waiting"
