"""The published drafter of a run, and the folders of drafters: the first one, and checkpoints'.

A checkpoint's folder holds the published drafter as vLLM loads it, its version, and, to resume
from, the state of the optimizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tlt.config.train import TrainConfig
from tlt.drafter.checkpoint import (
    adopt,
    drafter_weights,
    load_drafter,
    save_drafter,
    write_moments,
)
from tlt.drafter.eagle3.config import Eagle3Config, harvest_draft_vocabulary
from tlt.drafter.trainer import fresh_drafter

VERSION = "version.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = Mapping[str, torch.Tensor]


def make_drafter(
    policy: Path, out: Path, size: int | None, on_gpu: bool, dtype: str, seed: int
) -> Path:
    """Write a new drafter, which drafts nothing right until it is trained; return its folder.

    `size` is its vocabulary's; None takes the device's default.
    """
    from transformers import AutoConfig

    head, _ = head_and_embedding(read_embed_and_head(policy))
    model = AutoConfig.from_pretrained(policy)
    size = min(size or harvest_draft_vocabulary(model.vocab_size, on_gpu), model.vocab_size)
    drafter = fresh_drafter(model, head, torch.arange(size), seed)
    save_drafter(drafter, out, getattr(torch, dtype))
    (out / VERSION).write_text(json.dumps({"version": 0, "new": True}))
    return out


def start_drafter(config: TrainConfig, out: Path, checkpoint: Path | None) -> int:
    """Write the drafter that a run starts from to `out`, and return its version.

    A resumed run takes its published drafter. A new run takes a copy of `engine.drafter`, or makes
    a drafter.
    """
    if checkpoint is not None and (checkpoint / "drafter" / VERSION).exists():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(checkpoint / "drafter", out)
        return version_of(out)
    policy, dtype = Path(config.policy.model), config.policy.dtype
    if config.engine.drafter is None:
        on_gpu = config.engine.num_gpus > 0
        make_drafter(policy, out, config.tlt.draft_vocab_size, on_gpu, dtype, config.run.seed)
        return 0
    from transformers import AutoConfig

    num_layers = AutoConfig.from_pretrained(policy).num_hidden_layers
    adopt(Path(config.engine.drafter), out, getattr(torch, dtype), num_layers)
    (out / VERSION).unlink(missing_ok=True)  # of a drafter that an earlier start made
    return 0


def save_published(
    out: Path,
    start: Path,
    weights: Tensors | None,
    version: int,
    optimizer_state: Tensors | None,
) -> None:
    """Write the published drafter, which has the form of the drafter in `start`, or is that one."""
    drafter = load_drafter(start)
    if weights is not None:
        drafter.load_state_dict(weights)
    hidden = out.with_name(f".{out.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    save_drafter(drafter, hidden, getattr(torch, engine_dtype(start)))
    still_new = weights is None and is_new(start)
    (hidden / VERSION).write_text(json.dumps({"version": version, "new": still_new}))
    if optimizer_state is not None:
        write_moments(dict(optimizer_state), hidden)
    shutil.rmtree(out, ignore_errors=True)
    hidden.rename(out)


def version_of(folder: Path) -> int:
    """Return the version of a drafter: 0 unless a run has published it."""
    return int(_version(folder).get("version", 0))


def is_new(folder: Path) -> bool:
    """Return whether the drafter of a folder has never been trained."""
    return bool(_version(folder).get("new"))


def _version(folder: Path) -> dict[str, Any]:
    saved = folder / VERSION
    return json.loads(saved.read_text()) if saved.exists() else {}


def engine_dtype(folder: Path) -> str:
    """Return the dtype in which engines load the drafter of a folder."""
    return str(json.loads((folder / "config.json").read_text()).get("dtype", "bfloat16"))


def for_engines(weights: Tensors, start: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a drafter of the form in `start` as engines load them."""
    config = Eagle3Config.from_hf(json.loads((start / "config.json").read_text()))
    return drafter_weights(weights, config, getattr(torch, engine_dtype(start)))


def head_and_embedding(policy: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a policy's head and embedding; the head may be tied to the embedding."""
    embedding = policy[EMBEDDING]
    return policy.get(HEAD, embedding), embedding


def read_embed_and_head(folder: Path) -> dict[str, torch.Tensor]:
    """Return the embedding of a model folder, and its head if that is not tied."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in {EMBEDDING, HEAD}.intersection(opened.keys()):
                found[name] = opened.get_tensor(name)
    return found
