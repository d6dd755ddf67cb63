"""Puts TLT into every engine that this process builds (`tlt.vllm.switch` says how).

vLLM builds the settings of every engine in `EngineArgs.create_engine_config`, in the process of the
program. They travel from there to the engine's processes. `install` wraps that method, the check of
every request's sampling parameters, and the recording of statistics.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from tlt.contracts import StepReport
from tlt.errors import ConfigError
from tlt.vllm import switch
from tlt.vllm.environment import SWITCH_VARIABLE
from tlt.vllm.lossless_checks import check_params


def install() -> None:
    """Let `TLT_CONFIG` change the arguments of all engines from now on. Safe to call twice."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    create = EngineArgs.create_engine_config
    if hasattr(create, "tlt"):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = changed(self) | {"model": self.model}
        text = os.environ.get(SWITCH_VARIABLE, "")
        on_gpu = not current_platform.is_cpu()
        wired = switch.wire(text, given, on_gpu, lambda: _runner_type(self))
        if wired is not None:
            for key, value in wired.changes.items():
                setattr(self, key, _as_config(key, value))
            # A logger outside vLLM's namespace would not show up among vLLM's lines.
            init_logger("vllm.tlt").info(wired.message)
        return create(self, *args, **kwargs)

    create_engine_config.tlt = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    _check_requests()
    _notice_swaps()
    _send_last_samples()
    _count_arms()


def changed(args: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found = {}
    for field in dataclasses.fields(args):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(args, field.name)
        if value is not None and value != default:
            found[field.name] = value
    return found


def _runner_type(args: Any) -> str:
    """Return what vLLM would run a model for, by the arguments and the model's own config."""
    if args.runner != "auto":
        return str(args.runner)
    return str(copy.copy(args).create_model_config().runner_type)


def _as_config(key: str, value: Any) -> Any:
    """Return an argument as vLLM has it after the construction of `EngineArgs`."""
    from vllm.config import CompilationConfig, WeightTransferConfig

    kinds = {
        "compilation_config": CompilationConfig,
        "weight_transfer_config": WeightTransferConfig,
    }
    return kinds[key](**value) if key in kinds else value


def _check_requests() -> None:
    """Refuse requests whose sampling parameters do not work with drafts when vLLM gets them."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    class RefusedRequest(VLLMValidationError, ConfigError):
        """A user's mistake for TLT and for vLLM, whose servers answer other errors with 500."""

    verify = SamplingParams.verify

    @functools.wraps(verify)
    def verify_for_drafts(
        self: Any, model_config: Any, speculative_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        if speculative_config is not None:
            try:
                check_params(_asked_for(self))
            except ConfigError as error:
                raise RefusedRequest(str(error)) from None
        verify(self, model_config, speculative_config, *args, **kwargs)

    SamplingParams.verify = verify_for_drafts


def _notice_swaps() -> None:
    """Tell the strategy of an engine about drafter swaps, which reach only the workers."""
    from vllm.v1.engine.core import EngineCore

    call = EngineCore.collective_rpc

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        results = call(self, method, *args, **kwargs)
        if method == "tlt_swap_drafter":
            self.scheduler.controller.drafter_version += 1
        return results

    EngineCore.collective_rpc = collective_rpc


def _send_last_samples() -> None:
    """Send the samples that ended in an engine's last step, which no later one carries."""
    from vllm.v1.engine.core import EngineCore

    call = EngineCore.post_step

    @functools.wraps(call)
    def post_step(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        if whole := self.scheduler.take_last_whole():
            self.collective_rpc("tlt_keep_whole", args=(whole,))

    EngineCore.post_step = post_step


def _asked_for(params: Any) -> dict[str, Any]:
    """Return the sampling parameters that are neither empty nor the default."""
    default = _default_params()
    found = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        is_empty = value is None or (not isinstance(value, np.ndarray) and not value)
        if not is_empty and (value == getattr(default, name)) is not True:
            found[name] = value
    return found


@functools.cache
def _default_params() -> Any:
    from vllm import SamplingParams

    return SamplingParams()


# --- the arms in vLLM's own metrics -------------------------------------------------------------
#
# The scheduler counts in the engine's process; vLLM's metrics are in the process of the program.
# The counts travel with vLLM's statistics of each engine step, whose classes have no free field.
# They use a dict that every vLLM has, the counts of LoRA adapters by name: `attach` writes them
# there, and `take` removes them again before vLLM's loggers see the dict. Can go when vLLM lets a
# scheduler add statistics. With vLLM's statistics off (`disable_log_stats`, the default of
# `vllm.LLM`), nothing is counted.

COUNTERS = {
    "engine_steps": "Engine steps, by the arm whose drafts they verified.",
    "drafts": "Drafts verified, one per request and engine step.",
    "draft_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens accepted.",
    "output_tokens": "Tokens generated.",
}
"""Names of the counters, after `vllm:tlt_`, and their descriptions."""
_PREFIX = "tlt/"


def attach(outputs: Iterable[Any], report: StepReport) -> None:
    """Put the counts of an engine step into the statistics that go with its outputs."""
    stats = next((out.scheduler_stats for out in outputs if out.scheduler_stats), None)
    if stats is not None:
        stats.waiting_lora_adapters.update(counts(report))


def counts(report: StepReport) -> dict[str, int]:
    """Return an engine step's additions to the counters, by counter and arm."""
    values = (
        1,
        report.num_drafts,
        report.num_draft_tokens,
        report.num_accepted_tokens,
        report.num_output_tokens,
    )
    return {
        f"{_PREFIX}{name}/{report.verified}": value
        for name, value in zip(COUNTERS, values, strict=True)
    }


def take(stats: Any) -> dict[tuple[str, str], int]:
    """Remove the counts from the statistics of an engine step; return them by counter and arm."""
    by_name = {} if stats is None else stats.waiting_lora_adapters
    found = {}
    for key in [key for key in by_name if key.startswith(_PREFIX)]:
        name, arm = key.removeprefix(_PREFIX).split("/")
        found[name, arm] = by_name.pop(key)
    return found


def _count_arms() -> None:
    """Add the counters to vLLM's Prometheus metrics, in the process of the program."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    record = StatLoggerManager.record

    @functools.wraps(record)
    def record_arms(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        found = take(scheduler_stats)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if found:
            _count(self, found, engine_idx or 0)

    StatLoggerManager.record = record_arms


def _count(manager: Any, found: dict[tuple[str, str], int], engine_idx: int) -> None:
    """Add counts to TLT's counters in vLLM's Prometheus logger, if it has one."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    for logger in manager.stat_loggers:
        if not isinstance(logger, PrometheusStatLogger):
            continue
        if not hasattr(logger, "tlt_counters"):
            # vLLM removes all metrics `vllm:*` of an earlier engine when it builds a logger.
            logger.tlt_counters = {
                name: logger._counter_cls(
                    name=f"vllm:tlt_{name}",
                    documentation=text,
                    labelnames=["model_name", "engine", "arm"],
                )
                for name, text in COUNTERS.items()
            }
        labels = logger.per_engine_labelvalues[engine_idx]
        for (name, arm), value in found.items():
            logger.tlt_counters[name].labels(*labels, arm).inc(value)
