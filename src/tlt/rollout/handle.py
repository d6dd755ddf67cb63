"""Two protocols: an engine in another process as the pool sees it, and a user of idle devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tlt.contracts import Sample, SampleRequest


class EngineHandle(Protocol):
    """An engine in another process. An exception from `take_finished` means that it is lost."""

    async def start(self) -> dict[str, Any]: ...
    async def submit(self, requests: Sequence[SampleRequest]) -> None: ...
    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]: ...
    async def take_finished(self) -> list[Sample]:
        """Return finished samples; an empty list shows that the engine is alive."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of `RolloutEngine`."""
        ...

    async def stop(self, graceful: bool) -> None: ...


class LoadListener(Protocol):
    """A user of the devices of idle engines."""

    def ready(self, engine: str, report: Mapping[str, Any]) -> None:
        """Hear that an engine has started, with its report."""
        ...

    def idle(self, engine: str) -> None:
        """Hear that an engine has nothing to generate while others still do."""
        ...

    async def needed(self, engine: str) -> None:
        """Free the engine's device; the pool sends work to the engine after this returns."""
        ...


Spawner = Callable[[str], EngineHandle]


def place_of(engine: str) -> str:
    """Return the place of an engine. The successor of a lost engine takes its place."""
    return engine.split(".")[0]
