"""Batches of samples without Ray, from engines in child processes, for scripts and tests.

Each engine gets a fresh process: vLLM binds threads, patches torch, and does not start twice in one
process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import EngineStats, Sample, SampleRequest
from tlt.rollout.engine import RolloutEngine


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
