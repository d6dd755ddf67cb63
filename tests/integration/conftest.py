"""Models, drafters and engines, made once and shared: engines take seconds to start."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Before torch starts its threads: tests that run side by side have a core each.
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(worker.removeprefix("gw")) % len(_cores)]})

from engine_process import EngineProcess

from tlt.config.rollout import EngineConfig

TINY_ARGS = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
}
RESTLESS = {
    "kind": "adaptive",
    "look_every_steps": 2,
    "dwell_steps": 1,
    "margin": 0.0,
    "probe_share": 1.0,
    "first_probes_steps": 1e9,
    "switches_per_s": 1e9,
}
"""The adaptive policy without its caution: it looks at every drafter all the time."""
SWITCHING_ARMS = [["off", 0]] + [[d, k] for d in ("ngram", "eagle3") for k in (1, 2, 4, 8)]


def random_prompts(count: int, seed: int = 0, vocab: tuple[int, int] = (4, 260)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(*vocab) for _ in range(rng.randint(5, 40))] for _ in range(count)]


def greedy(policy, prompts, max_tokens: int) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """The reference: what transformers says, prompt by prompt."""
    import torch

    tokens = []
    for prompt in prompts:
        output = policy.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(tuple(output[0, len(prompt) :].tolist()))
    return tokens


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_drafter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows the tiny model a little: trained for some 20 seconds."""
    import torch
    from learning import tiny_samples, train_tiny

    from tlt.drafter.checkpoint import save_drafter

    trainer = train_tiny(tiny, tiny_samples(tiny, 256), num_steps=100)
    out = tmp_path_factory.mktemp("models") / "tiny-eagle3"
    return save_drafter(trainer.drafter, out, torch.float32)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import smollm2

    return smollm2.make(tmp_path_factory.mktemp("models") / "smollm2")


EngineFactory = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def engines() -> Iterator[EngineFactory]:
    """Start engines that live as long as the module; each binds to any core."""
    running: list[EngineProcess] = []

    def start(
        environment: dict[str, str] | None = None, begin: bool = True, **settings: Any
    ) -> EngineProcess:
        settings = {
            "kv_cache_gib": 0.5,
            "engine_args": TINY_ARGS,
            "core_group": f"test-{len(running)}",
        } | settings
        engine = EngineProcess(EngineConfig(**settings), environment)
        running.append(engine)
        if begin:
            engine.start()
        return engine

    yield start
    for engine in running:
        engine.close()
