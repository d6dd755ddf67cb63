"""An engine in a separate process, driven through a pipe: like an actor, without Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import EngineStats, Sample, SampleRequest, SamplingSpec

# Engines are forked from a process that has imported vLLM, because the import takes longer than the
# rest of their start.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["engine_imports"])


def serve(config: EngineConfig, environment: dict[str, str], pipe: Any) -> None:
    """Run an engine in this process, and call the methods that the pipe names."""
    os.environ.update({"TQDM_DISABLE": "1"} | environment)
    from tlt.rollout.engine import RolloutEngine

    engine = RolloutEngine(config)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            target = partial(method, engine) if callable(method) else getattr(engine, method)
            pipe.send((True, target(*args) if callable(target) else target))
        except BaseException as error:
            pipe.send((False, (type(error), str(error), traceback.format_exc())))
        if method == "shutdown":
            break


def call_in_process(context: Any, prepare: Callable[[], None], function: Any, *args: Any) -> Any:
    """Call `prepare` and a function in a new process; return the function's result."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, prepare, function, args))
    process.start()
    theirs.close()
    try:
        good, value = ours.recv()
    except EOFError:
        process.join()
        good, value = False, f"exit code {process.exitcode}"
    process.join()
    assert good, value
    return value


def _answer(pipe: Any, prepare: Callable[[], None], function: Any, args: Sequence[Any]) -> None:
    prepare()
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        # A child of multiprocessing waits for its own children before vLLM's finalizers end them.
        for engine in multiprocessing.active_children():
            engine.terminate()


def tokens_read(engine: Any, requests: Sequence[SampleRequest]) -> int:
    """Generate these requests, and return how many tokens engine steps read for them."""
    scheduler = engine.core.llm.engine_core.engine_core.scheduler
    counts: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = type(scheduler).schedule(scheduler, *args, **kwargs)
        counts.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    engine.submit(requests)
    num_ended = 0
    while num_ended < len(requests):
        num_ended += len(engine.take_finished(timeout_s=1.0))
    del scheduler.schedule
    return sum(counts)


class EngineProcess:
    """A `RolloutEngine` in a child process, and calls of its methods through a pipe."""

    context: Any = _context
    """How the process starts, of `multiprocessing`."""
    serve = staticmethod(serve)
    """What the process runs."""

    def __init__(self, config: EngineConfig, environment: dict[str, str] | None = None) -> None:
        self._pipe, theirs = self.context.Pipe()
        self._process = self.context.Process(
            target=self.serve, args=(config, environment or {}, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._runs = 0

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """Call a method of the engine by its name, or a function with the engine."""
        self._pipe.send((method, args))
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ChildProcessError(f"exit code {self._process.exitcode}") from None
        if not good:
            kind, message, trace = value
            try:
                raise kind(message)
            except TypeError:
                raise RuntimeError(trace) from None
        return value

    def start(self) -> dict[str, Any]:
        return self.call("start")

    def stats(self) -> EngineStats:
        return self.call("stats")

    def submit(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[str]:
        self._runs += 1
        requests = [
            SampleRequest(f"{self._runs}/{index}", tuple(prompt), sampling)
            for index, prompt in enumerate(prompts)
        ]
        self.call("submit", requests)
        return [r.sample_id for r in requests]

    def collect(self, ids: Sequence[str]) -> list[Sample]:
        samples: dict[str, Sample] = {}
        while len(samples) < len(ids):
            for sample in self.call("take_finished", 30.0):
                samples[sample.sample_id] = sample
        return [samples[i] for i in ids]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        return self.collect(self.submit(prompts, sampling))

    def tokens_of(self, requests: Sequence[SampleRequest]) -> list[tuple[int, ...]]:
        """Return the tokens of requests that have their own settings."""
        self.call("submit", list(requests))
        return [sample.token_ids for sample in self.collect([r.sample_id for r in requests])]

    def accepted_during(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """Return a function's result, and the share of drafted tokens accepted meanwhile."""
        before = self.stats()
        result = function()
        after = self.stats()
        drafted = after.draft_tokens - before.draft_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        return result, accepted / drafted if drafted else 0.0

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(ChildProcessError, BrokenPipeError):
                self.call("shutdown")
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
