"""Samples without Ray, from engines in child processes, for scripts, benchmarks and tests.

Each engine gets a fresh process: vLLM binds threads, patches torch, and does not start twice in one
process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tlt.config.rollout import EngineConfig
from tlt.contracts import EngineStats, Sample, SampleRequest
from tlt.errors import EngineGone
from tlt.rollout.client import Engine
from tlt.rollout.engine import RolloutEngine

P = ParamSpec("P")
T = TypeVar("T")

NOTED_CHARS = 10_000
"""Characters of an engine's output that are added to an error."""

_engine: RolloutEngine | None = None
"""The engine of this process, if it is the child of a `ChildEngine`."""


def generate(
    config: EngineConfig, requests: Sequence[SampleRequest], num_engines: int = 1
) -> list[Sample]:
    """Return one sample per request, in the order of the requests."""
    context = multiprocessing.get_context("spawn")
    shares = [requests[index::num_engines] for index in range(num_engines)]
    with ProcessPoolExecutor(num_engines, mp_context=context) as executor:
        futures = [executor.submit(generate_here, config, list(share)) for share in shares if share]
        samples = {s.sample_id: s for future in futures for s in future.result()[0]}
    return [samples[request.sample_id] for request in requests]


def generate_here(
    config: EngineConfig, requests: Sequence[SampleRequest]
) -> tuple[list[Sample], EngineStats, dict[str, Any]]:
    """Generate in this process; return samples, the engine's counters and its start-up report."""
    engine = RolloutEngine(config)
    report = engine.start()
    try:
        engine.submit(requests)
        samples: list[Sample] = []
        while len(samples) < len(requests):
            samples.extend(engine.take_finished(timeout_s=10.0))
        return samples, engine.stats(), report
    finally:
        engine.shutdown()


class ChildEngine:
    """An engine in a child process, which starts at once; `call` gives it a command.

    The process's output goes into a file, which is shown if the process dies, and added to an error
    that leaves the `with` block.
    """

    def __init__(self, config: EngineConfig, name: str = "engine-0") -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix=f"tlt-{name}-")
        self._printed = Path(self._folder.name) / "printed.log"
        self._printed.touch()
        self._executor = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_print_to,
            initargs=(str(self._printed),),
        )
        self._started = self._executor.submit(_start, config, name)

    def __enter__(self) -> ChildEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._started.done() and self._started.exception() is None and error is None:
            self.call(Engine.shutdown)
        self._executor.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:
            error.add_note(f"{self._name} printed:\n{self._tail(NOTED_CHARS)}")
        self._folder.cleanup()

    def report(self) -> dict[str, Any]:
        """Wait until the engine has started, and return its report."""
        return self._result(self._started)

    def call(
        self, command: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Give the engine a command, and return its answer."""
        return self._result(self._executor.submit(_call, command.__name__, args, kwargs))

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise EngineGone(f"{self._name}: its process has ended\n{self._tail(2000)}") from error

    def _tail(self, num_chars: int) -> str:
        return self._printed.read_text(errors="replace").strip()[-num_chars:]


def _print_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())


def _start(config: EngineConfig, name: str) -> dict[str, Any]:
    global _engine
    _engine = RolloutEngine(config, name)
    return _engine.start()


def _call(command: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return getattr(_engine, command)(*args, **kwargs)
