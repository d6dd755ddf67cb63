"""Digests of the files that a run reads, to notice changes before a resume.

Models that the settings name by an id of the Hub are brought here first. `inputs.json` in the run's
folder holds a digest of the data, the start policy and the user's own functions. A resumed run with
other ones would be another run under the same name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.config.load import read_json
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.models.hub import local_folder
from tlt.train.manifest import write_synced

INPUTS = "inputs.json"
PIECE_BYTES = 1 << 16
NUM_PIECES = 64
"""Pieces of a large file that are read: any training changes all tensors."""


def with_local_models(config: TrainConfig) -> TrainConfig:
    """Return the settings with folders for the ids of the Hub, which are downloaded."""
    policy = {"model": str(local_folder(config.policy.model, "policy.model"))}
    sections: dict[str, Any] = {"policy": config.policy.model_copy(update=policy)}
    if config.engine.drafter is not None:
        drafter = {"drafter": str(local_folder(config.engine.drafter, "engine.drafter"))}
        sections["engine"] = config.engine.model_copy(update=drafter)
    return config.model_copy(update=sections)


def digests(config: TrainConfig) -> dict[str, str]:
    """Return a digest of everything that a run reads, by the setting that names it."""
    found = {"policy.model": _folder_digest(Path(config.policy.model))}
    if config.task.path is not None:
        found["task.path"] = _file_digest(Path(config.task.path), whole=True)
    functions = {
        "reward.function": config.reward.function,
        "task.environment": config.task.environment or "",
        "algorithm.advantage": config.algorithm.advantage,
        "algorithm.loss": config.algorithm.loss,
    }
    for key, function in functions.items():
        if (source := _source(function)) is not None:
            found[key] = _file_digest(source, whole=True)
    return found


def check_inputs(folder: Path, config: TrainConfig) -> None:
    """Refuse to resume a run whose data, start policy or functions have changed."""
    _compare(folder, digests(config))


def check_start_policy(folder: Path, model: Path) -> None:
    """Refuse to merge a run's adapters into another policy than they were trained on."""
    _compare(folder, {"policy.model": _folder_digest(model)})


def _compare(folder: Path, found: Mapping[str, str]) -> None:
    path = folder / INPUTS
    if not path.exists():
        return  # nothing to compare with
    before = read_json(path, "a list of what the run reads", "remove it to compare nothing")
    for key, digest in found.items():
        if before.get(key, digest) != digest:
            raise ConfigError(
                f"{key}: its files have changed since the run in {folder} started; put them back, "
                f"start a new run.out, or remove {path} to continue with the changed ones"
            )


def write_inputs(folder: Path, config: TrainConfig) -> None:
    """Write down what the run reads, at its first start."""
    if not (folder / INPUTS).exists():
        write_synced(folder / INPUTS, json.dumps(digests(config), indent=2))


def _source(function: str) -> Path | None:
    module, separator, _ = function.partition(":")
    if not separator:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _folder_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        digest.update(f"{path.name} {_file_digest(path)} ".encode())
    return digest.hexdigest()


def _file_digest(path: Path, whole: bool = False) -> str:
    """Return a digest of a file's size and content, or of evenly spread pieces of it."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    digest.update(f"{size} ".encode())
    with path.open("rb") as file:
        if whole or size <= NUM_PIECES * PIECE_BYTES:
            while piece := file.read(1 << 22):
                digest.update(piece)
            return digest.hexdigest()
        for number in range(NUM_PIECES):
            file.seek(number * (size - PIECE_BYTES) // (NUM_PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
