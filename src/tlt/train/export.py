"""The policy of a run at one of its checkpoints, also while the run continues.

Nothing in the run's folder changes: a checkpoint is only read, and the run may remove it meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlt.config.load import check, read_toml
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.learner.export import checkpoint_weights, write_policy
from tlt.learner.lora import merged_policy
from tlt.models.hub import local_folder
from tlt.train.folder import RunFolder, step_of, why_damaged
from tlt.train.inputs import check_start_policy
from tlt.train.manifest import verify

ATTEMPTS = 3
"""Checkpoints to try before giving up: a fast run soon removes the newest one that was listed."""


def export_policy(run: Path, step: int | None, out: Path) -> int:
    """Write the policy of a checkpoint, the newest sound one by default; return its RL step."""
    path = run / "config.toml"
    if not path.exists():
        raise ConfigError(
            f"{run} is not a run: it holds no config.toml; name the folder that run.out named"
        )
    config = resolve_defaults(check(TrainConfig, read_toml(path), str(path)))
    source = local_folder(config.policy.model, "policy.model")
    lora, dtype = config.learner.lora, config.policy.dtype
    if lora.rank:
        check_start_policy(run, source)
    for _ in range(ATTEMPTS):
        checkpoint = _checkpoint(run, step, config.checkpoint.every_steps)
        try:
            weights = checkpoint_weights(checkpoint / "learner", "float32" if lora.rank else dtype)
        except Exception:  # torch wraps the error of a missing file
            if checkpoint.exists():
                raise
            continue
        adapter = weights if lora.rank else {}
        if adapter:
            weights = merged_policy(source, adapter, lora, dtype)
        write_policy(weights, source, out, dtype, adapter, lora)
        return step_of(checkpoint)
    raise ConfigError(
        f"{checkpoint} was removed while it was read: the run keeps {config.checkpoint.keep}; try "
        "again, or let a run keep more with checkpoint.keep"
    )


def _checkpoint(run: Path, step: int | None, every_steps: int) -> Path:
    """Return the checkpoint of an RL step, or the newest one whose learner state is sound."""
    there = RunFolder(run).checkpoints()
    steps = ", ".join(str(step_of(path)) for path in there)
    if not there:
        raise ConfigError(
            f"{run} holds no policy and no checkpoint yet; wait for RL step {every_steps} "
            "(checkpoint.every_steps), or give the model it started from"
        )
    chosen = [path for path in there if step is None or step_of(path) == step]
    if not chosen:
        raise ConfigError(f"--step {step}: {run} has checkpoints of RL steps {steps}; name one")
    for path in reversed(chosen):
        if not (why := why_damaged(path, *verify(path, "learner/"))):
            return path
    raise ConfigError(
        f"{chosen[-1]} is damaged ({why}); name another one with --step, of RL steps {steps}"
    )


@contextmanager
def policy_at(target: str, step: int | None) -> Iterator[tuple[Path | None, int | None]]:
    """Yield a folder with the policy of a run's checkpoint, and its RL step.

    The folder lasts as long as the context. Yield None for a model, and for a finished run without
    a step: its own `policy/` counts.
    """
    run = Path(target)
    if not (run / "config.toml").exists():
        if step is not None:
            raise ConfigError(
                f"--step {step} is for a run, and {target} holds no config.toml; leave it out"
            )
        yield None, None
        return
    if step is None and (run / "policy").exists():
        yield None, None
        return
    with tempfile.TemporaryDirectory(prefix="tlt-eval-") as folder:
        policy = Path(folder) / "policy"
        yield policy, export_policy(run, step, policy)
