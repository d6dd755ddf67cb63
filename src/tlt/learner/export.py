"""The policy as a Hugging Face folder, from a learner's ranks or from a checkpoint's files.

A checkpoint holds the sharded state of `LearnerRank`: float32 weights, or with LoRA the adapters
alone, and the optimizer's moments.
Reading it needs no process group and no GPU, and leaves the moments alone.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tlt.config.train import LoraConfig
from tlt.learner.experts import by_expert
from tlt.learner.lora import write_adapter

PREFIX = "policy.policy."
"""Names of the policy's weights in a checkpoint: its key, and `PackedPolicy.policy`."""
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
CHUNK_BYTES = 1 << 31
"""Bytes of float32 weights to read at a time."""


def write_policy(
    weights: Mapping[str, torch.Tensor],
    source: Path,
    folder: Path,
    dtype: str,
    adapter: Mapping[str, torch.Tensor],
    lora: LoraConfig,
) -> None:
    """Write weights with the tokenizer and settings of `source`; the folder appears as a whole.

    With LoRA its `adapter/` holds the adapters alone, in peft's format.
    """
    out = folder.with_name(f".{folder.name}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in source.iterdir():
        holds_weights = file.suffix in (".safetensors", ".bin", ".gguf")
        if file.is_file() and not holds_weights and not file.name.endswith(".index.json"):
            shutil.copy(file, out / file.name)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    kept = dict(weights)
    tied = config.get("tie_word_embeddings") and {HEAD, EMBEDDINGS} <= kept.keys()
    if tied and kept[HEAD].equal(kept[EMBEDDINGS]):  # a checkpoint has both names
        del kept[HEAD]
    save_file(kept, out / "model.safetensors", {"format": "pt"})
    if adapter:
        write_adapter(adapter, lora, source, out / "adapter")
    shutil.rmtree(folder, ignore_errors=True)
    out.rename(folder)


def checkpoint_weights(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Return the policy's weights from the learner's part of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    sizes = {
        name: tuple(of.size)
        for name, of in known.items()
        if name.startswith(PREFIX) and isinstance(of, dcp.metadata.TensorStorageMetadata)
    }
    assert sizes, f"{folder} holds no weights under {PREFIX}"
    for names in _chunks(sizes):
        state = {name: torch.empty(sizes[name]) for name in names}
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(state, storage_reader=reader, no_dist=True)  # warns that one process reads
        for name in names:
            tensor = state.pop(name).to(getattr(torch, dtype))
            found |= by_expert(name.removeprefix(PREFIX), tensor)
    return found


def _chunks(sizes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield names of tensors that are read together."""
    chunk, num_bytes = list[str](), 0
    for name, size in sizes.items():
        chunk.append(name)
        num_bytes += 4 * prod(size)
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
