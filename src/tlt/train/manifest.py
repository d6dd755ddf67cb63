"""The seal of a checkpoint: `state.json` lists every file with its size and checksum.

`seal` writes the list last, after every file and folder is synced to disk. `verify` compares a
checkpoint with its list. The checksum is CRC-32: it finds every flipped bit, a zeroed page and a
truncated file, and it protects against accidents, not against people.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STATE = "state.json"
CHUNK_BYTES = 1 << 22
NUM_THREADS = 4
"""Files that are read at the same time."""


def seal(folder: Path, step: int) -> None:
    """Sync all files of a checkpoint to disk, and list them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        facts = threads.map(lambda name: _facts(folder / name, sync=True), names)
        content = {"step": step, "files": dict(zip(names, facts, strict=True))}
    write_synced(folder / STATE, json.dumps({**content, "checksum": _checksum(content)}))
    for inside, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(inside))


def verify(folder: Path, part: str = "") -> tuple[int, dict[str, str]]:
    """Return the RL step of a checkpoint, and what is wrong with its files, by their names.

    Only the files whose names begin with `part` are read.
    """
    try:
        content = json.loads((folder / STATE).read_text())
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return 0, {STATE: f"it is not a list of files ({error})"}
    files = {name: facts for name, facts in content["files"].items() if name.startswith(part)}
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = threads.map(lambda name: (name, _difference(folder / name, *files[name])), files)
        return content["step"], {name: what for name, what in found if what}


def write_synced(path: Path, text: str) -> None:
    """Replace a file as a whole; after a crash it holds the old or the new text."""
    hidden = path.with_name(f".{path.name}")
    with hidden.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _difference(path: Path, size: int, checksum: int) -> str:
    try:
        if path.stat().st_size != size:
            return f"{path.stat().st_size} bytes instead of {size}"
        return "" if _facts(path, sync=False)[1] == checksum else "its checksum differs"
    except OSError as error:
        return error.strerror or "it cannot be read"


def _facts(path: Path, sync: bool) -> list[int]:
    """Return size and checksum of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(file.fileno())
    return [size, checksum]
