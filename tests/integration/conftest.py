"""Models, drafters and engines, made once and shared: engines take seconds to start."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import TINY_ARGS, EngineFactory, load_policy, save_fresh_drafter

from tlt.config.rollout import EngineConfig


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of pytest-xdist have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def made_once(path: Path) -> Iterator[bool]:
    """Let one worker make what all workers use; yield whether it is still missing."""
    done = path.with_suffix(".done")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_drafter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a drafter trained on the tiny model for about 20 seconds."""
    import torch
    from learning import tiny_samples, train_tiny

    from tlt.drafter.checkpoint import save_drafter

    out = shared_folder(tmp_path_factory) / "tiny-eagle3"
    with made_once(out) as missing:
        if missing:
            trainer = train_tiny(tiny, tiny_samples(tiny, 256), num_steps=100)
            save_drafter(trainer.drafter, out, torch.float32)
    return out


@pytest.fixture(scope="session")
def fresh_drafter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained drafter, for tests that do not depend on its drafts."""
    return save_fresh_drafter(load_policy(tiny), tmp_path_factory.mktemp("models") / "fresh")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import smollm2

    out = shared_folder(tmp_path_factory) / "smollm2"
    with made_once(out) as missing:
        if missing:
            smollm2.make(out)
    return out


@pytest.fixture(scope="module")
def engines() -> Iterator[EngineFactory]:
    """Start engines that live as long as the module; each binds to any core."""
    running: list[EngineProcess] = []

    def start(
        environment: dict[str, str] | None = None, begin: bool = True, **settings: Any
    ) -> EngineProcess:
        defaults: dict[str, Any] = {
            "kv_cache_gib": 0.5,
            "engine_args": TINY_ARGS,
            "core_group": f"test-{len(running)}",
        }
        engine = EngineProcess(EngineConfig(**(defaults | settings)), environment)
        running.append(engine)
        if begin:
            engine.start()
        return engine

    yield start
    for engine in running:
        engine.close()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Start Ray with two cores, for one module."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
