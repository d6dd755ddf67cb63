"""The arms in vLLM's own metrics: engine steps, drafts and tokens of every arm.

The scheduler counts in the engine's process; vLLM's metrics are in the process of the program. The
counts travel with vLLM's statistics of each engine step, whose classes have no field for others.
They use a dict of counts by name that every vLLM has, of LoRA adapters: `attach` writes them there,
and `take` removes them again before vLLM's loggers see the dict. Can go when vLLM lets a scheduler
add statistics.

With vLLM's statistics off (`disable_log_stats`, the default of `vllm.LLM`), nothing is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from tlt.contracts import StepReport

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
    """Return what an engine step adds to the counters, by counter and arm."""
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


def install() -> None:
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
    """Add counts to the counters beside those of vLLM's Prometheus logger, if it has one."""
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
