"""The drafter's training inside other frameworks: what their integrations share."""

from __future__ import annotations

from pathlib import Path

import torch

from tlt.config.train import TltConfig
from tlt.drafter.trainer import TrainerSettings
from tlt.hardware import compute_dtype
from tlt.harvest.published import is_new, make_drafter
from tlt.harvest.trainer import (
    AVERAGED_STEPS,
    DRAFTER_LR,
    NEW_AVERAGED_STEPS,
    NEW_DRAFTER_LR,
    HarvestTrainerSettings,
)
from tlt.models.hub import local_folder
from tlt.states.buffer import BufferSettings


def new_drafter(model: str, out: str, dtype: str = "bfloat16", seed: int = 0) -> str:
    """Write an untrained drafter for a model unless `out` has one; return `out`.

    The model is a folder or an id on the Hub.
    """
    if not (Path(out) / "config.json").exists():
        on_gpu = torch.cuda.is_available()
        make_drafter(local_folder(model, "model"), Path(out), None, on_gpu, dtype, seed)
    return out


def harvest_settings(
    drafter: Path,
    policy: str,
    buffer: BufferSettings,
    tlt: TltConfig,
    temperature: float,
    seed: int,
    on_gpu: bool,
) -> HarvestTrainerSettings:
    """Return the settings of a drafter's trainer; drafters are evaluated at `temperature`."""
    untrained = is_new(drafter)
    return HarvestTrainerSettings(
        drafter=str(drafter),
        policy=str(local_folder(policy, "model")),
        buffer=buffer,
        trainer=TrainerSettings(
            num_draft_tokens=tlt.num_draft_tokens,
            row_tokens=tlt.row_tokens,
            lr=tlt.lr or (NEW_DRAFTER_LR if untrained else DRAFTER_LR),
            averaged_steps=NEW_AVERAGED_STEPS if untrained else AVERAGED_STEPS,
            temperature=temperature,
            bfloat16=compute_dtype(on_gpu=on_gpu) == "bfloat16",
            seed=seed,
        ),
        held_out_tokens=tlt.held_out_tokens,
        untrained=untrained,
    )
