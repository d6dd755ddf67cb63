"""A run's folder: its settings, its results, and its checkpoints.

    config.toml      resolved settings            versions.json   libraries and command lines
    metrics.jsonl    one line per RL step         samples/        responses to read, by RL step
    timeline.json    every worker's seconds       lengths.jsonl   response lengths, by RL step
    checkpoints/     what a run resumes from      policy/         the trained model, at the end
    live.json        what the run is doing now    drafter/        its drafter, if it has one
    inputs.json      digests of what it reads     policy-before/  policy of a run being extended
    summary.json     the run in a few numbers
    run.log          what the driver did          logs/           what engines, ranks, trainers did

A checkpoint is written to a hidden folder and becomes visible by a rename, after its RL step's line
of metrics. So the last visible checkpoint and the metrics up to its RL step belong together,
whenever a process dies. A resumed run does everything later again. It resumes from the newest sound
checkpoint (`manifest`), and sets damaged ones aside.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import tomli_w

from tlt.config.load import read_toml
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.train.manifest import seal, sync_folder, verify, write_synced

logger = logging.getLogger(__name__)

POLICY_BEFORE = "policy-before"
LOCK = ".lock"
"""File that the process of a run has locked."""
CHECKPOINT = re.compile(r"step-\d{6,}")
"""Name of a checkpoint."""
MAY_CHANGE = (
    *("run.out", "run.num_steps", "run.checkpoint_on_term", "run.term_timeout_s"),
    *("checkpoint", "eval", "metrics", "pool", "engine", "placement", "tlt", "capture", "alarm"),
    *("debug.core_group", "debug.publish_drafters", "debug.gate"),
    *(f"learner.{key}" for key in ("num_ranks", "num_gpus", "num_cores", "row_tokens")),
    "learner.gradient_checkpointing",
    *("learner.max_restarts", "learner.timeout_s", "reward.num_workers", "reward.timeout_s"),
)
"""Settings that a resumed run may change; any other would make it a different run."""


class RunFolder:
    """Reads and writes a run's folder; at most one process has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self.lengths = path / "lengths.jsonl"
        self.live = path / "live.json"
        self._sound: set[Path] = set()
        """Checkpoints that this process has written or verified."""
        self._lock: IO[str] | None = None

    # --- begin and resume ---------------------------------------------------------------------

    def check(self, config: TrainConfig, resume: bool) -> None:
        """Refuse to overwrite a run, or to resume it with settings that make it a different run."""
        self._check_writable()
        exists = (self.path / "config.toml").exists()
        if exists and not resume:
            raise ConfigError(
                f"run.out = {str(self.path)!r} already holds a run; add --resume to continue it, "
                "or choose another folder"
            )
        if not resume:
            return
        if not exists:
            raise ConfigError(
                f"run.out = {str(self.path)!r} holds no run to resume; start without --resume"
            )
        try:
            before = _flat(read_toml(self.path / "config.toml"))
        except ConfigError as error:
            raise ConfigError(
                f"{self.path / 'config.toml'}, which the run was started with, is damaged "
                f"({error}); fix it, or start a new run.out"
            ) from error
        now = _flat(config.model_dump(exclude_none=True))
        for key in sorted({*before, *now}):
            free = any(key == k or key.startswith(f"{k}.") for k in MAY_CHANGE)
            if config.task.path is not None and key in ("eval.every_steps", "eval.num_problems"):
                free = False  # the held-out rows decide which rows of a file are trained on
            if not free and before.get(key) != now.get(key):
                raise ConfigError(
                    f"{key} = {now.get(key)!r}, but the run in {self.path} was started with "
                    f"{before.get(key)!r}; use that value, or start a new run.out"
                )

    def _check_writable(self) -> None:
        """Try to write into the existing part of the path: permissions do not tell everything."""
        there = self.path
        try:
            while not there.exists() and there != there.parent:
                there = there.parent
            tempfile.TemporaryDirectory(prefix=".tlt-", dir=there).cleanup()
        except OSError as error:
            raise ConfigError(
                f"run.out = {str(self.path)!r}: nothing can be written to {there} "
                f"({error.strerror}); choose another folder, e.g. 'runs/first'"
            ) from error

    def open(self, config: TrainConfig, versions: Mapping[str, str], command: str) -> None:
        """Lock the folder for this process, and write down settings, versions and command."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK).open("w")
        if not _locked(self._lock):
            raise ConfigError(
                f"run.out = {str(self.path)!r} is in use by another process; wait for it, or "
                "choose another folder"
            )
        write_synced(self.path / "config.toml", tomli_w.dumps(config.model_dump(exclude_none=True)))
        record = self.path / "versions.json"
        starts = _starts(record)
        starts.append({"command": command, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        write_synced(record, json.dumps({"versions": dict(versions), "starts": starts}, indent=2))
        for leftover in (self.path / "checkpoints").glob(".step-*"):
            shutil.rmtree(leftover)

    # --- checkpoints --------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first; folders of other names are a user's."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted((path for path in found if CHECKPOINT.fullmatch(path.name)), key=step_of)

    def oldest_checkpoint(self) -> int:
        """Return the RL step of the oldest checkpoint, from which a run may resume; 0 if none."""
        kept = self.checkpoints()
        return step_of(kept[0]) if kept else 0

    def last_checkpoint(self, verify_again: bool = False) -> tuple[Path | None, int]:
        """Return the newest sound checkpoint and the number of RL steps it holds.

        Damaged checkpoints that are newer get another name. A checkpoint is verified once in a
        process, unless `verify_again`.
        """
        if verify_again:
            self._sound.clear()
        damaged: dict[Path, str] = {}
        for path in reversed(self.checkpoints()):
            if path not in self._sound and (why := _why_unsound(path)):
                damaged[path] = why
                continue
            self._sound.add(path)
            for each, why in damaged.items():
                aside = each.with_name(f"{each.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                each.rename(aside)
                logger.warning(
                    "checkpoint %s is damaged (%s), and is now %s; the run continues from %s",
                    *(each, why, aside.name, path.name),
                )
            return path, step_of(path)
        for newest, why in damaged.items():
            raise ConfigError(
                f"no checkpoint of {self.path} is sound; the newest, {newest.name}, is damaged "
                f"({why}). Copy a sound one to {newest.parent}, or start a new run.out"
            )
        return None, 0

    def begin_checkpoint(self, step: int) -> Path:
        """Return an empty hidden folder for the checkpoint of an RL step."""
        hidden = self.path / "checkpoints" / f".step-{step:06d}"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        return hidden

    def publish_checkpoint(self, hidden: Path, step: int, keep: int) -> None:
        """Make a complete checkpoint visible, then remove the oldest beyond `keep`."""
        seal(hidden, step)
        visible = hidden.with_name(hidden.name.removeprefix("."))
        if visible.exists():
            _remove(visible)
        hidden.rename(visible)
        sync_folder(visible.parent)
        self._sound.add(visible)
        for old in self.checkpoints()[:-keep]:
            _remove(old)

    # --- the trained policy -------------------------------------------------------------------

    def set_policy_aside(self) -> None:
        """Rename the policy of a run that is now extended; it stays until the next one is there."""
        if (self.path / "policy").exists():
            self.forget_policy_before()
            (self.path / "policy").rename(self.path / POLICY_BEFORE)

    def forget_policy_before(self) -> None:
        """Remove the policy that was set aside."""
        shutil.rmtree(self.path / POLICY_BEFORE, ignore_errors=True)

    # --- files to read ------------------------------------------------------------------------

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(dict(sample), ensure_ascii=False) for sample in samples]
        if lines:
            (self.path / "samples").mkdir(exist_ok=True)
            write_synced(self.path / "samples" / f"step-{step:06d}.jsonl", "\n".join(lines) + "\n")

    def forget_samples(self, step: int) -> None:
        """Remove the samples of RL steps after this one."""
        for path in (self.path / "samples").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                path.unlink()


def _locked(lock: IO[str]) -> bool:
    """Lock a run's folder; try again, because `is_open` holds the lock for a moment."""
    for _ in range(5):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def is_open(folder: Path) -> bool:
    """Return whether a process has a run's folder open."""
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remove(folder: Path) -> None:
    """Hide a folder, then remove it: a crash leaves no half-removed checkpoint."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def step_of(checkpoint: Path) -> int:
    """Return the RL step of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _why_unsound(checkpoint: Path) -> str:
    """Return what is wrong with a checkpoint; empty if a run can resume from it.

    Damaged captured samples do not count: the run continues without them.
    """
    step, damaged = verify(checkpoint)
    for name in [name for name in damaged if name.startswith("buffer-")]:
        logger.warning("%s: %s; left out", checkpoint / name, damaged.pop(name))
        (checkpoint / name).unlink(missing_ok=True)
    return why_damaged(checkpoint, step, damaged)


def why_damaged(checkpoint: Path, step: int, damaged: Mapping[str, str]) -> str:
    """Return in words what `verify` has found of a checkpoint; empty if it is sound."""
    if not damaged and step != step_of(checkpoint):
        return f"it holds RL step {step}"
    return "; ".join(f"{name}: {what}" for name, what in damaged.items())


def _starts(record: Path) -> list[Any]:
    """Return the earlier starts of a run, none if their file is damaged."""
    if not record.exists():
        return []
    try:
        return list(json.loads(record.read_text())["starts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        logger.warning("%s is damaged: the earlier starts of the run are forgotten", record)
        return []


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
