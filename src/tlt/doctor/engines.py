"""Small engines for checks, their work, and the comparison of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.rollout.client import Engine
from tlt.rollout.offline import ChildEngine
from tlt.rollout.recheck import first_difference

SWITCHING = {
    "kind": "random",
    "arms": [["off", 0], *([d, k] for d in ("ngram", "eagle3") for k in (1, 3, 7))],
    "seed": 1,
}
KV_CACHE_BYTES = 2**28
ROUNDED_SHARE = 0.25
"""Share of the samples that may differ on a GPU where weights are compared, not drafts."""
LEAST_ACCEPTED = 0.1
"""Share of the trained drafter's tokens that the tiny policy accepts at least."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs: the models and the device of its engines."""

    folder: Path
    """Folder with `policy`, its `drafter`, and the files of a check."""
    num_gpus: int
    """GPUs of this machine; 0 runs all checks on CPU engines."""

    @property
    def models(self) -> dict[str, str]:
        """The folders of the policy and its drafter, as settings of an engine."""
        return {"model": str(self.folder / "policy"), "drafter": str(self.folder / "drafter")}

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine that is not tensor-parallel."""
        return min(1, self.num_gpus)

    @property
    def room(self) -> dict[str, Any]:
        """The arguments of vLLM that let two small engines share a GPU."""
        limits = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": KV_CACHE_BYTES}
        return limits if self.num_gpus else {}


def engine_config(place: Place, **settings: Any) -> EngineConfig:
    """Return a small engine with a drafter and all arms of `SWITCHING`."""
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}
    args |= place.room | settings.pop("engine_args", {})
    defaults: dict[str, Any] = {"strategy": SWITCHING, "num_gpus": place.engine_gpus}
    defaults |= {"core_group": "doctor", "engine_args": args}
    return EngineConfig(**(place.models | defaults | settings))


@contextmanager
def started(config: EngineConfig) -> Iterator[ChildEngine]:
    """Yield an engine that has started."""
    with ChildEngine(config, "engine") as engine:
        engine.report()
        yield engine


def work(count: int, max_tokens: int, rl_step: int | None = None) -> list[SampleRequest]:
    """Return requests with random prompts and seeds, every other one greedy."""
    rng = random.Random(0)
    requests = []
    for number in range(count):
        prompt = tuple(rng.randrange(4, 260) for _ in range(rng.randint(5, 40)))
        spec = SamplingSpec(max_tokens, float(number % 2), seed=number, ignore_eos=True)
        requests.append(SampleRequest(str(number), prompt, spec, rl_step))
    return requests


def tokens_of(engine: ChildEngine, requests: Sequence[SampleRequest]) -> list[tuple[int, ...]]:
    """Generate, and return the tokens of each request."""
    engine.call(Engine.submit, list(requests))
    return collect(engine, requests)


def collect(engine: ChildEngine, requests: Sequence[SampleRequest]) -> list[tuple[int, ...]]:
    """Wait for submitted requests, and return the tokens of each."""
    found: dict[str, tuple[int, ...]] = {}
    while len(found) < len(requests):
        found |= {s.sample_id: s.token_ids for s in engine.call(Engine.take_finished, 5.0)}
    return [found[request.sample_id] for request in requests]


def expect_same(
    place: Place, got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], when: str
) -> int:
    """Return how many samples differ, and raise if they are too many.

    On a GPU a few may differ, because kernels round by batch size. Wrong weights change nearly all.
    """
    positions = [first_difference(a, b) for a, b in zip(expected, got, strict=True)]
    differing = [(sample, at) for sample, at in enumerate(positions) if at is not None]
    allowed = int(ROUNDED_SHARE * len(expected)) if place.num_gpus else 0
    if len(differing) > allowed:
        sample, at = differing[0]
        raise AssertionError(
            f"{when}: {len(differing)} of {len(got)} samples differ, the first in sample {sample} "
            f"at token {at}: {got[sample][at : at + 4]} instead of {expected[sample][at : at + 4]}"
        )
    return len(differing)
