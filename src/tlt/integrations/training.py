"""The drafter's training inside other frameworks: what their integrations share."""

from __future__ import annotations

from pathlib import Path

import torch

from tlt.harvest.published import make_drafter
from tlt.models.hub import local_folder


def new_drafter(model: str, out: str, dtype: str = "bfloat16", seed: int = 0) -> str:
    """Write an untrained drafter for a model unless `out` has one; return `out`.

    The model is a folder or an id on the Hub.
    """
    if not (Path(out) / "config.json").exists():
        on_gpu = torch.cuda.is_available()
        make_drafter(local_folder(model, "model"), Path(out), None, on_gpu, dtype, seed)
    return out
