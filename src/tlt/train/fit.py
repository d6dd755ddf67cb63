"""Refuse runs whose memory plan does not fit, with settings that make it fit. Pure.

The settings are found by trying: each is one that the whole plan was calculated with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tlt.drafter.eagle3.config import DRAFT_VOCABULARY
from tlt.errors import ConfigError
from tlt.train.memory import GIB, Place, Sizes, engine_parts, memory_plan

Changes = dict[str, Any]
"""Values of settings, by their dotted names."""

UTILIZATION = "engine.engine_args.gpu_memory_utilization"
ENGINE = f"a GPU, share of the engine ({UTILIZATION})"
MAX_FIXES = 6
"""Places that one piece of advice may fix."""


def check_memory(sizes: Sizes) -> list[Place]:
    """Return the memory plan; raise a `ConfigError` if it does not fit, with settings that do."""
    place = _too_small(sizes)
    if place is None:
        return memory_plan(sizes)
    assert place.capacity is not None
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in place.parts)
    raise ConfigError(
        f"memory of {place.name}: {place.need / GIB:.1f} GiB do not fit into "
        f"{place.capacity / GIB:.1f} ({parts}); {_advice(sizes, place)}"
    )


def _too_small(sizes: Sizes) -> Place | None:
    """Return the first place that does not fit."""
    places = memory_plan(sizes)
    if sizes.on_gpu and (gpu_bytes := sizes.machine.gpu_bytes) is not None:
        # vLLM does not start unless the KV cache holds one sample.
        least = f"KV cache of {sizes.max_model_len} tokens", sizes.max_model_len * sizes.kv_token
        share = int(sizes.utilization * gpu_bytes)
        places.append(Place(ENGINE, share, (*engine_parts(sizes), least)))
    # The learner first: it decides how much is left for engines beside it.
    places.sort(key=lambda place: place.name != "a GPU, update")
    return next((place for place in places if not place.fits), None)


def _advice(sizes: Sizes, place: Place) -> str:
    for tried in ({}, *_more_gpus(sizes), *_shorter(sizes)):
        if (found := _fixed(sizes, tried)) is not None:
            return "e.g. " + ", ".join(
                f"{key} = {str(value).lower()}" for key, value in found.items()
            )
    need, key = math.ceil(place.need / GIB), "gpu" if "GPU" in place.name else "host"
    largest = max(place.parts, key=lambda part: part[1])[0]
    return (
        f"most of it is {largest}; use a smaller model, or nodes with {need} GiB (node.{key}_gib)"
    )


def _fixed(sizes: Sizes, changes: Changes) -> Changes | None:
    """Return the changes extended until every place fits, or None."""
    for _ in range(MAX_FIXES):
        tried = sizes.changed(changes)
        place = _too_small(tried)
        if place is None:
            return changes
        for fix in _fixes(tried, place):
            better = _too_small(tried.changed(fix))
            if better is None or better.name != place.name:
                changes = changes | fix
                break
        else:
            return None
    return None


def _fixes(sizes: Sizes, place: Place) -> Iterator[Changes]:
    """Yield settings that leave more room in a place, the cheapest first."""
    config, gpu_bytes = sizes.config, sizes.machine.gpu_bytes or 1
    over = place.need - (place.capacity or 0)
    less: Changes = {}
    if place.name == "a GPU, generating":
        yield {UTILIZATION: math.floor(100 * (sizes.utilization - over / gpu_bytes)) / 100}
    elif place.name == ENGINE:
        if (share := math.ceil(100 * place.need / gpu_bytes) / 100) <= 1:
            yield {UTILIZATION: share}
    elif place.name == "a GPU, harvest":
        if sizes.draft_vocab > DRAFT_VOCABULARY and config.engine.drafter is None:
            yield {"tlt.draft_vocab_size": DRAFT_VOCABULARY}
        yield {"tlt.harvest": False}
    if place.name in ("a GPU, update", "host"):
        if not config.learner.gradient_checkpointing:
            yield (less := {"learner.gradient_checkpointing": True})
        if config.learner.row_tokens > sizes.longest_sample:
            yield less | {"learner.row_tokens": sizes.longest_sample}
    if place.name.startswith("host"):
        captured = dict(place.parts).get("captured states", 0)
        if sizes.records:
            yield {"capture.by": "learner"}
        if over < captured / 2:
            yield {"capture.capacity_gib": math.floor((captured - over) / GIB * 100) / 100}
    if place.name == "host":
        engines = config.pool.num_engines
        cache = config.engine.kv_cache_gib - over / engines / GIB
        if cache * GIB >= sizes.max_model_len * sizes.kv_token:
            yield {"engine.kv_cache_gib": math.floor(100 * cache) / 100}
        if engines > 1:
            yield less | {"pool.num_engines": engines // 2}


def _more_gpus(sizes: Sizes) -> Iterator[Changes]:
    """Yield settings for more ranks, and for engines on more GPUs; colocated, they share GPUs."""
    config, given = sizes.config, sizes.config.engine.num_gpus
    widths = [given, *(n for n in (2, 4, 8, 16) if n > given and sizes.shape.heads % n == 0)]
    for power in range(11 * sizes.on_gpu):
        ranks = config.learner.num_ranks * 2**power
        for gpus in widths:
            changes = {"learner.num_ranks": ranks} if power else {}
            if gpus > given:
                changes["engine.num_gpus"] = gpus
            if sizes.colocated and changes:
                changes["pool.num_engines"] = engines = max(1, ranks // gpus)
                changes["learner.num_ranks"] = engines * gpus
            yield changes


def _shorter(sizes: Sizes) -> Iterator[Changes]:
    given, limit = sizes.config.sampling.max_tokens, "max_model_len"
    for share in range(15, 0, -1):
        changes = {"sampling.max_tokens": max(1, given * share // 16)}
        if limit in sizes.config.engine.engine_args:
            shorter = sizes.max_model_len - given + changes["sampling.max_tokens"]
            changes[f"engine.engine_args.{limit}"] = shorter
        yield changes
