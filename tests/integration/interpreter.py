"""vLLM's V2 model runner, the default on GPUs, on a CPU: Triton's interpreter runs its kernels.

The interpreter must be chosen before Triton and vLLM are imported, so everything here happens in
child processes. `InterpretedEngine` is an `EngineProcess` whose engine runs on V2. `interpreted`
calls one function in a child process, for tests of kernels without an engine. An engine step of the
tiny model takes 0.2 to 0.5 s.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, call_in_process, serve

from gpu import kernels
from tlt.config.rollout import EngineConfig

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_context = multiprocessing.get_context("spawn")


def prepare() -> None:
    """Let vLLM run on V2 in this process. Call it before anything imports Triton or vLLM."""
    os.environ.update(ENVIRONMENT)
    import triton.backends

    # vLLM switches Triton off on a CPU whose Triton has no backend of this name.
    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    _patch_once()
    _let_indices_convert()
    _let_masks_convert()
    _add_log1p()
    _allow_async_scheduling()
    _complete_events()
    if folder := os.environ.get(kernels.VARIABLE):
        kernels.note(Path(folder))


def _patch_once() -> None:
    """Patch Triton's language once.

    The interpreter patches it anew at every launch and every call of a device function, which takes
    half of the time of a greedy engine and three quarters of a sampling one.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    for module in (tl, tl.core):
        interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": module}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _let_indices_convert() -> None:
    """Give the index of a loop the method `to`, as it has in a compiled kernel (top-p, top-k)."""
    import triton.language as tl

    class Index(int):
        def to(self, dtype: Any) -> int:
            return int(self)

    for module in (tl, tl.core):
        count = module.range
        module.range = lambda *args, count=count, **kwargs: map(Index, count(*args, **kwargs))


def _let_masks_convert() -> None:
    """Make every mask of a load boolean: with a scalar in it, the interpreter's is a number."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load

    def masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(builder, pointers, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    InterpreterBuilder.create_masked_load = masked_load


def _add_log1p() -> None:
    """Give the interpreter the one function of `libdevice` that vLLM's rejection sampler calls."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            data = np.log1p(x.handle.data)
        return tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

    libdevice.log1p = log1p


def _allow_async_scheduling() -> None:
    """Leave asynchronous scheduling on: vLLM turns it off on a CPU, whose V1 runner cannot."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(update)
    def keeping(cls: Any, vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(keeping)


def _complete_events() -> None:
    """Give vLLM's stand-in for events on a CPU the method `query`: what it records has ended."""
    from vllm.v1.worker.cpu import shm

    shm._EventPlaceholder.query = lambda event: True


def _serve(config: EngineConfig, environment: dict[str, str], pipe: Any) -> None:
    prepare()
    serve(config, environment, pipe)


class InterpretedEngine(EngineProcess):
    """A `RolloutEngine` on vLLM's V2 runner, in a child process."""

    context = _context
    serve = staticmethod(_serve)


def interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in a child process with the interpreter; return its result."""
    return call_in_process(_context, prepare, function, *args)
