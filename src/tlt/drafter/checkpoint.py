"""Drafter folders as vLLM loads them, and the versions that a training run stores.

A folder holds `config.json` and `model.safetensors`. Folders are read in the plain layout and in
the speculators format, and written in the plain layout; `export` writes both. A version in a
`VersionStore` is such a folder plus the trainer's state, without the policy's head and embedding.
Saving copies the tensors and returns; a thread writes them into a hidden folder and makes the
folder visible by a rename. A crash in between leaves the earlier versions unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.speculators import plain_config, plain_tensors
from tlt.drafter.trainer import DrafterTrainer, drafter_part
from tlt.errors import ConfigError

WEIGHTS = "model.safetensors"
TRAINER = "trainer.safetensors"
STATE = "state.json"
MOMENTS = "optimizer.state"
"""State of the drafter's optimizer; vLLM would load a file that ends in .safetensors."""


# --- folders that vLLM loads ----------------------------------------------------------------------


def save_drafter(drafter: Eagle3Drafter, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a drafter folder. A new folder is complete when its weights appear."""
    return _write_folder(out, drafter.config, drafter.state_dict(), dtype)


def drafter_weights(
    state: Mapping[str, torch.Tensor], config: Eagle3Config, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors under the names that vLLM loads."""
    weights = {}
    for name, tensor in state.items():
        if name == "d2t":
            # vLLM expects the mapping only for a draft vocabulary smaller than the policy's.
            if not config.drafts_all_tokens:
                weights[name] = tensor.cpu()
        else:
            weights[name] = tensor.detach().to("cpu", dtype).contiguous()
    return weights


def load_drafter(
    folder: Path, dtype: torch.dtype = torch.float32, num_target_layers: int | None = None
) -> Eagle3Drafter:
    """Load a drafter folder of either format.

    Published drafters may leave open which hidden states they read; `num_target_layers` then says
    it.
    """
    return build_drafter(folder, *read_drafter(folder, num_target_layers)).to(dtype)


def build_drafter(
    folder: Path, config: Eagle3Config, tensors: Mapping[str, torch.Tensor]
) -> Eagle3Drafter:
    """Return the drafter of `read_drafter`'s answer; refuse tensors that do not fit its config."""
    try:
        drafter = Eagle3Drafter(config)
        all_tokens = {"d2t": torch.zeros(config.draft_vocab_size, dtype=torch.long)}
        drafter.load_state_dict(all_tokens | dict(tensors))
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise _damaged(folder, error) from error
    return drafter


def read_drafter(
    folder: Path, num_target_layers: int | None = None
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Return a drafter's config and its tensors as they are stored, under our names."""
    try:
        said = json.loads((folder / "config.json").read_text())
        config = Eagle3Config.from_hf(plain_config(said), num_target_layers)
        parts = sorted(folder.glob("model-*.safetensors")) or [folder / WEIGHTS]
        stored: dict[str, torch.Tensor] = {}
        for part in parts:
            stored |= load_file(part)
        state = plain_tensors(stored)
        _sort_vocabulary(config, state)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not a drafter folder: {Path(error.filename or WEIGHTS).name} is missing; "
            "make one with `tlt drafter train`"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    except Exception as error:  # any error that the libraries raise for a damaged file
        raise _damaged(folder, error) from error
    return config, state


def _sort_vocabulary(config: Eagle3Config, state: dict[str, torch.Tensor]) -> None:
    """Sort a draft vocabulary that was made elsewhere, with the rows of the drafter's head."""
    d2t = state.pop("d2t", None)
    if d2t is None or config.drafts_all_tokens:
        return
    places = torch.arange(config.draft_vocab_size)
    token_ids, order = (places + d2t.long()).sort()
    if token_ids[0] < 0 or token_ids[-1] >= config.vocab_size or (token_ids.diff() == 0).any():
        raise ValueError("d2t names tokens twice, or tokens that the model does not have")
    if not torch.equal(order, places):
        state["lm_head.weight"] = state["lm_head.weight"][order].contiguous()
    state["d2t"] = token_ids - places


def read_moments(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the optimizer's state stored with a drafter, for `DrafterTrainer.take_moments`."""
    try:
        if (folder / MOMENTS).exists():
            return load_file(folder / MOMENTS)
        if not (folder / TRAINER).exists():
            return None
        tensors = load_file(folder / TRAINER)
        step = json.loads((folder / STATE).read_text())["progress"]["step"]
    except Exception as error:  # any error that the libraries raise for a damaged file
        raise _damaged(folder, error) from error
    moments = {name: t for name, t in tensors.items() if name.startswith("optimizer.")}
    return moments | {"d2t": tensors["drafter.d2t"], "step": torch.tensor(step)}


def write_moments(moments: dict[str, torch.Tensor] | None, folder: Path) -> None:
    """Write the optimizer's state into a drafter's folder; None removes an old one."""
    if moments is None:
        (folder / MOMENTS).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(moments, folder / MOMENTS)


def adopt(source: Path, out: Path, dtype: torch.dtype, num_target_layers: int | None) -> Path:
    """Copy a drafter of any format as a run's own, with the optimizer's state if it has one."""
    drafter = load_drafter(source, num_target_layers=num_target_layers)
    write_moments(read_moments(source), out)
    return save_drafter(drafter, out, dtype)


def _damaged(folder: Path, error: Exception) -> ConfigError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return ConfigError(
        f"the drafter in {folder} is damaged ({said}); copy it again, or make one with "
        "`tlt drafter train`"
    )


def _write_folder(
    out: Path, config: Eagle3Config, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Path:
    hf_config = config.to_hf(str(dtype).removeprefix("torch."))
    return write_files(out, hf_config, drafter_weights(state, config, dtype))


def write_files(out: Path, hf_config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write the files of a drafter folder, the weights last."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f"{WEIGHTS}.partial"
    save_file(weights, partial, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    partial.rename(out / WEIGHTS)
    return out


# --- versions of a training run -------------------------------------------------------------------


class VersionStore:
    """Numbered versions of a drafter in training, of which the last `keep` stay on disk.

    One process writes a folder; any process may read it. Call `clean` before writing if an earlier
    writer may have died.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16, keep: int = 3) -> None:
        self.folder = folder
        self._dtype = dtype
        self._keep = keep
        self._staged: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove the leftovers of a writer that died."""
        for leftover in self.folder.glob(".v*"):
            shutil.rmtree(leftover)

    def versions(self) -> list[int]:
        """List the complete versions, oldest first."""
        return sorted(int(path.name[1:]) for path in self.folder.glob("v*"))

    def path(self, version: int) -> Path:
        """Return the folder of a version."""
        return self.folder / f"v{version:06d}"

    def save(self, trainer: DrafterTrainer, notes: dict[str, Any] | None = None) -> int:
        """Start writing the next version and return its number.

        Wait only for a write that is still under way.
        """
        self.wait()
        version = (self.versions() or [0])[-1] + 1
        for name, tensor in trainer.tensors().items():
            staged = self._staged.get(name)
            if staged is None or staged.shape != tensor.shape:
                self._staged[name] = tensor.detach().to("cpu", copy=True)
            else:
                staged.copy_(tensor)
        state = {"version": version, "progress": trainer.progress(), "notes": notes or {}}
        config = trainer.drafter.config
        self._thread = threading.Thread(
            target=self._write, args=(version, config, state), name="drafter-checkpoint"
        )
        self._thread.start()
        return version

    def wait(self) -> None:
        """Wait until the version being written is on disk; raise the error of a failed write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def restore(self, trainer: DrafterTrainer, version: int | None = None) -> dict[str, Any]:
        """Restore the trainer from a version, by default the last one, and return its notes."""
        versions = self.versions()
        if not versions:
            raise ConfigError(f"{self.folder} has no drafter version to continue from")
        folder = self.path(version or versions[-1])
        state = json.loads((folder / STATE).read_text())
        trainer.restore(load_file(folder / TRAINER), state["progress"])
        notes: dict[str, Any] = state["notes"]
        return notes

    def _write(self, version: int, config: Eagle3Config, state: dict[str, Any]) -> None:
        hidden = self.folder / f".v{version:06d}"
        try:
            _write_folder(hidden, config, drafter_part(self._staged), self._dtype)
            save_file(self._staged, hidden / TRAINER)
            (hidden / STATE).write_text(json.dumps(state))
            for path in (*hidden.iterdir(), hidden):
                _sync(path)
            hidden.rename(self.path(version))
            _sync(self.folder)
            for old in self.versions()[: -self._keep]:
                _remove(self.path(old))
        except BaseException as error:
            self._error = error


def _remove(version: Path) -> None:
    """Hide a version, then remove it: a crash leaves no half-removed version."""
    hidden = version.with_name(f".{version.name}")
    version.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    """Flush to disk: a rename must not get there before the files that it makes visible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
