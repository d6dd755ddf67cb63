"""Model folders, checked without loading any weights: their settings and the sizes of their files.

A file of weights begins with a list of its tensors, which says how long the file must be. So a
download that was cut off is found in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError

SHAPE_KEYS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "vocab_size"),
}
"""Keys of a config.json that memory is calculated from."""
SIZE_KEYS = (*sorted(SHAPE_KEYS), "max_position_embeddings", "num_key_value_heads", "head_dim")
"""Keys of a config.json that are sizes wherever they are there."""
LARGEST_SIZE = 10**9
MAX_HEADER_BYTES = 100_000_000
"""Longest list of tensors that the format allows."""


def read_model(folder: Path, key: str) -> dict[str, Any]:
    """Return the config.json of the folder that `key` names; refuse one that nothing can load."""
    way_out = "make one with `tlt models smollm2`, or name a Hugging Face folder"
    model = read_settings(folder, key, way_out)
    index = folder / "model.safetensors.index.json"
    files = {file.name for file in folder.glob("*.safetensors")}
    wanted = {"*.safetensors"} if not files else set[str]()
    if index.exists():
        shards = _read_json(index, key, way_out).get("weight_map", {})
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise ConfigError(f"{key}: {index} lists no files; download the model again")
        wanted = {*shards.values()} - files
    if wanted:
        raise ConfigError(
            f"{key} = {str(folder)!r} holds no {min(wanted)}; save the model with "
            "`save_pretrained`, or download it again"
        )
    _check_weights(folder, key, "download it again")
    return model


def check_drafter(folder: Path, model: Mapping[str, Any], key: str) -> None:
    """Refuse a folder, named by `key`, that holds no drafter of this model."""
    way_out = "make one with `tlt drafter train`, or leave it out"
    drafter = _read_json(folder / "config.json", key, way_out)
    layer = drafter.get("transformer_layer_config")  # of the speculators format
    own = layer if isinstance(layer, dict) else drafter
    own = own | {"hidden_size": drafter.get("target_hidden_size") or own.get("hidden_size")}
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{key} = {str(folder)!r} holds no *.safetensors; {way_out}")
    for name in ("hidden_size", "vocab_size"):
        if own.get(name) != model.get(name):
            raise ConfigError(
                f"{key} = {str(folder)!r} is a drafter of another model: {name} is "
                f"{own.get(name)}, of the policy {model.get(name)}; train one for this model"
            )
    _check_weights(folder, key, way_out)


def is_outline(folder: Path) -> bool:
    """Return whether a folder holds a config.json and nothing else."""
    try:
        return [file.name for file in folder.iterdir()] == ["config.json"]
    except OSError:
        return False


def read_settings(folder: Path, key: str, way_out: str) -> dict[str, Any]:
    """Return the config.json of a model, with its sizes checked."""
    model = _read_json(folder / "config.json", key, way_out)
    for name in SIZE_KEYS:
        size = model.get(name)
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_whole and 1 <= size <= LARGEST_SIZE):
            raise ConfigError(
                f"{key}: {folder / 'config.json'} says {name} = {repr(size)[:40]}, which is not "
                f"a size; {way_out}"
            )
    heads, hidden = model.get("num_attention_heads") or 1, model.get("hidden_size") or LARGEST_SIZE
    if heads > hidden:
        raise ConfigError(
            f"{key}: {folder / 'config.json'} says num_attention_heads = {heads}, more than "
            f"hidden_size = {hidden}; {way_out}"
        )
    return model


def _read_json(path: Path, key: str, way_out: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError:
        raise ConfigError(
            f"{key} = {str(path.parent)!r} holds no {path.name} that can be read; {way_out}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} is not JSON: {error}; {way_out}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: {path} holds no settings; {way_out}")
    return found


# --- files of weights -----------------------------------------------------------------------------


def _check_weights(folder: Path, key: str, way_out: str) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        if why := damage(file):
            raise ConfigError(f"{key}: {file} is damaged ({why}); {way_out}")


def damage(file: Path) -> str:
    """Return what is wrong with a file of weights; empty if it is as long as its list says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                return f"{size} bytes are less than its list of tensors"
            tensors = json.loads(content.read(length))
        ends = [of["data_offsets"][1] for name, of in tensors.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except OSError as error:
        return error.strerror or "it cannot be read"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "it has no list of tensors"
    return "" if size == whole else f"{size} bytes instead of {whole}"
