"""Messages between a run, its engines, harvest and its trainers.

A run talks to `RunHarvest`: to `HarvestSession` where idle workers train the drafter, to
`NoHarvest` elsewhere. Harvest talks to the run's engines through `Engines`, and to trainers through
`TrainerHandle`. Nothing here needs Ray or torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tlt.rollout.weights import NewWeights
    from tlt.spans import Span

Record = dict[str, float]


class RunHarvest:
    """The calls that a run makes to harvest; here they do nothing."""

    async def start(self) -> None: ...
    def rollout_started(self, num_samples: int) -> None: ...
    def rollout_grew(self, num_samples: int) -> None: ...
    def sample_finished(self) -> None: ...
    async def rollout_ended(self) -> None: ...
    def update_started(self) -> None: ...
    async def update_ended(self) -> None: ...
    def policy_changed(self, weights: NewWeights, version: int) -> None: ...
    def alarm(self, drafts: int, accepted: int) -> None: ...
    async def save(self, folder: Path, to_resume: bool) -> None: ...
    async def stop(self) -> None: ...

    def record(self) -> Record:
        return {}

    def leased(self) -> list[str]:
        return []

    def take_spans(self) -> dict[str, list[Span]]:
        return {}


class NoHarvest(RunHarvest):
    """A run without harvest."""


class Engines(Protocol):
    """The engines of a run, as harvest sees them; a `RolloutPool` has these methods."""

    @property
    def engines(self) -> list[str]:
        """Names of the engines that are ready."""
        ...

    async def sleep_engine(self, engine: str) -> None:
        """Let an engine give its device's memory away."""
        ...

    async def wake_engine(self, engine: str) -> None:
        """Let an engine take its device's memory back."""
        ...

    async def update_drafter(
        self, weights: NewWeights, version: int, skip: Collection[str] = ()
    ) -> list[float]:
        """Load a drafter into all engines but those to skip; return the seconds of each."""
        ...

    async def refresh_drafter(self, engine: str) -> None:
        """Load the last drafter into an engine that was skipped."""
        ...


# --- trainers -------------------------------------------------------------------------------------


class TrainerFailed(RuntimeError):
    """A call of a trainer failed."""


class TrainerGone(TrainerFailed):
    """The trainer's process is dead."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a drafter, or embedding and head of a policy."""

    version: int
    """Version of a drafter; 0 is the drafter that the engines started with. Of a policy, the
    policy's version."""
    blob: Any = None
    """The tensors, or their location: opaque here. None for version 0."""


@dataclass(frozen=True, slots=True)
class Version:
    """A drafter for the engines."""

    number: int
    """Number of drafters published in this run, counted across resumes."""
    weights: Weights
    length: float
    """Expected tokens per draft on held-out samples."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a piece of training."""

    num_steps: int
    num_tokens: int
    loss: float
    starved: bool
    """Whether there was nothing to learn from."""
    late_s: float = 0.0
    """Seconds by which training took longer than its emulated time."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The drafter compared with the published one on the same held-out samples."""

    better: bool
    length: float
    """Expected tokens per verified draft."""
    published_length: float


class TrainerHandle(Protocol):
    """A `HarvestTrainer` elsewhere; a call that fails raises `TrainerFailed`."""

    async def start(self) -> None:
        """Return when the trainer can take a lease."""
        ...

    async def begin(self, lease: int, seconds: float) -> bool: ...
    async def end(self, lease: int) -> None: ...
    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None: ...
    async def train(self, lease: int, seconds: float) -> Trained: ...
    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None: ...
    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool: ...
    async def export(self) -> Any: ...
    async def optimizer_state(self) -> Any: ...
    async def release(self) -> None: ...
    async def kill(self) -> None:
        """Return when the process is gone."""
        ...
