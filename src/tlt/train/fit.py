"""Refuses runs whose memory plan does not fit, with a setting that makes it fit. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tlt.drafter.eagle3.config import DRAFT_VOCABULARY
from tlt.errors import ConfigError
from tlt.train.memory import GIB, Place, Sizes


def check_memory(sizes: Sizes, places: list[Place]) -> None:
    """Raise a `ConfigError` for the first place that is too small, with a setting that works."""
    ways_out: dict[str, Callable[[Sizes, Place], str]] = {
        "a GPU, generating": _less_for_the_engine,
        "a GPU, harvest": _less_for_the_trainer,
        "a GPU, update": _less_for_the_learner,
    }
    # The learner first: it decides how much is left for engines beside it.
    for place in sorted(places, key=lambda place: place.name != "a GPU, update"):
        if place.fits and place.name == "a GPU, generating":
            _refuse_small_cache(sizes, place)
        if place.fits:
            continue
        assert place.capacity is not None
        way_out = ways_out.get(place.name, _less_for_the_host)(sizes, place)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in place.parts)
        raise ConfigError(
            f"memory of {place.name}: {place.need / GIB:.1f} GiB do not fit into "
            f"{place.capacity / GIB:.1f} ({parts}); {way_out}"
        )


def _refuse_small_cache(sizes: Sizes, place: Place) -> None:
    """Refuse an engine whose KV cache does not hold one sample: vLLM would not start."""
    if (capacity := place.capacity) is None:
        return
    need = sizes.max_model_len * sizes.kv_token_bytes()
    *others, (_, cache) = sizes.engine_parts(capacity, sizes.utilization)
    if cache >= need:
        return
    own = sum(size for _, size in others)
    beside = sum(size for _, size in sizes.beside())
    way_out = _split(sizes)
    share = math.ceil(100 * (own + need) / capacity) / 100
    if share * capacity + beside <= capacity:
        way_out = f"e.g. engine.engine_args.gpu_memory_utilization = {share:g}"
    raise ConfigError(
        f"engine.engine_args.gpu_memory_utilization = {sizes.utilization:g} leaves "
        f"{cache / GIB:.1f} GiB for the KV cache, but a sample of {sizes.max_model_len} tokens "
        f"needs {need / GIB:.1f}; {way_out}"
    )


def _less_for_the_engine(sizes: Sizes, place: Place) -> str:
    capacity = place.capacity
    assert capacity is not None
    *others, _ = sizes.engine_parts(capacity, sizes.utilization)
    need = sum(size for _, size in others) + sizes.max_model_len * sizes.kv_token_bytes()

    def share(num_ranks: int) -> float:
        beside = sum(size for _, size in sizes.beside(num_ranks=num_ranks))
        return math.floor(100 * (capacity - beside) / capacity) / 100

    ranks = sizes.config.learner.num_ranks
    enough = next((n for n in (ranks, *_doubled(ranks)) if share(n) * capacity >= need), None)
    if enough is None:
        return _split(sizes)
    more = f"more GPUs, {_ranks(sizes, enough)}, with " if enough > ranks else "e.g. "
    return f"{more}engine.engine_args.gpu_memory_utilization = {share(enough):g}"


def _less_for_the_trainer(sizes: Sizes, place: Place) -> str:
    if sizes.draft_vocab > DRAFT_VOCABULARY and sizes.engine.drafter is None:
        return f"e.g. tlt.draft_vocab_size = {DRAFT_VOCABULARY}"
    return "e.g. tlt.harvest = false"


def _less_for_the_learner(sizes: Sizes, place: Place) -> str:
    capacity = place.capacity
    assert capacity is not None

    def fits(**changes: Any) -> bool:
        parts = sizes.update_parts(sizes.learner(**changes))
        return sum(size for _, size in parts) <= capacity

    learner = sizes.config.learner
    changes: dict[str, Any] = {}
    if not learner.gradient_checkpointing:
        changes["gradient_checkpointing"] = True
        if fits(**changes):
            return "e.g. learner.gradient_checkpointing = true"
    longest = sizes.longest_sample
    if learner.row_tokens > longest and fits(**changes, row_tokens=longest):
        return "e.g. " + _written(changes | {"row_tokens": longest})
    ways = []
    ranks = next((n for n in _doubled(learner.num_ranks) if fits(**changes, num_ranks=n)), None)
    if ranks is not None:
        more = [_ranks(sizes, ranks), *([_written(changes)] if changes else [])]
        ways.append(f"more GPUs for the learner, {', '.join(more)}")
    shorter = next(
        (n for n in range(longest - longest % 1024, 0, -1024) if fits(**changes, row_tokens=n)),
        None,
    )
    if shorter is not None:
        lower = max(1, sizes.config.sampling.max_tokens - (longest - shorter))
        written = _written(changes | {"row_tokens": shorter})
        if "max_model_len" in sizes.engine.engine_args:
            limit = sizes.max_model_len - (longest - shorter)
            written += f", engine.engine_args.max_model_len = {limit}"
        ways.append(f"shorter samples, sampling.max_tokens = {lower} with {written}")
    return "; or ".join(ways) or "use a smaller model or larger GPUs (node.gpu_gib)"


def _doubled(ranks: int) -> list[int]:
    return [ranks * 2**power for power in range(1, 11)]


def _split(sizes: Sizes) -> str:
    gpus, engines = 2 * sizes.engine.num_gpus, sizes.config.pool.num_engines
    written = f"split the engine over more GPUs, e.g. engine.num_gpus = {gpus}"
    if sizes.colocated:
        engines = max(1, engines // 2)
        written += f", pool.num_engines = {engines}, learner.num_ranks = {engines * gpus}"
    return written


def _ranks(sizes: Sizes, num_ranks: int) -> str:
    """Return the settings for this many ranks; colocated, each has an engine's GPU."""
    written = f"learner.num_ranks = {num_ranks}"
    if sizes.colocated:
        written += f", pool.num_engines = {max(1, num_ranks // sizes.engine.num_gpus)}"
    return written


def _written(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"learner.{key} = {str(value).lower()}" for key, value in changes.items())


def _less_for_the_host(sizes: Sizes, place: Place) -> str:
    assert place.capacity is not None
    over = place.need - place.capacity
    captured = dict(place.parts).get("captured states", 0)
    if over < captured / 2:
        room = math.floor((captured - over) / GIB * 100) / 100
        return f"e.g. capture.capacity_gib = {room:g}"
    if not sizes.on_gpu:
        return (
            f"most of it is {place.largest}; e.g. a lower learner.row_tokens, engine.kv_cache_gib "
            "or pool.num_engines"
        )
    return (
        f"most of it is {place.largest}; use nodes with {math.ceil(place.need / GIB)} GiB "
        "(node.host_gib), or fewer GPUs of each node (node.num_gpus)"
    )
