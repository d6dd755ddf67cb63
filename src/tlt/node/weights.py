"""Weights in shared memory, through which a trainer hands them to the engines of its node.

The trainer writes one file per version, in a separate folder (`tlt.node.shared`): a JSON header
with the name, dtype, shape and offset of each tensor, then the raw bytes. Every engine worker of
the node maps the file and loads from it, so one copy serves all workers. Only the file's name, the
`manifest()`, travels through Ray. The owner removes the file when the engines are done; an open
mapping keeps its pages until it closes. The header also holds the fingerprint of each tensor from
before it was written (`fingerprint`). By these fingerprints an engine proves that it computes with
these weights.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from tlt.node.fingerprint import Fingerprint, fingerprint
from tlt.node.shared import SharedFolder, open_file

ALIGNMENT = 64
_MAGIC = b"TLTW0002"


class SharedWeights:
    """One version of weights in shared memory, which this process owns until it calls `close`."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        entries: list[dict[str, Any]] = []
        arrays: list[torch.Tensor] = []
        offset = 0
        seed = secrets.randbits(31)
        for name, tensor in tensors:
            array = tensor.detach().to("cpu").contiguous()
            dtype = str(array.dtype).removeprefix("torch.")
            fields = {"name": name, "dtype": dtype, "shape": list(array.shape), "offset": offset}
            entries.append(fields | {"fingerprint": fingerprint(array, seed)})
            arrays.append(array)
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        header = json.dumps({"seed": seed, "tensors": entries}).encode()
        start = -(-(len(_MAGIC) + 8 + len(header)) // ALIGNMENT) * ALIGNMENT
        with self._new_file(start + offset) as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            file.flush()
            with mmap.mmap(file.fileno(), start + offset) as mapping:
                view = torch.frombuffer(mapping, dtype=torch.uint8)
                for entry, array in zip(entries, arrays, strict=True):
                    if array.numel():
                        at = start + entry["offset"]
                        raw = array.reshape(-1).view(torch.uint8)
                        view[at : at + raw.numel()].copy_(raw)
                del view

    @classmethod
    def adopt(cls, path: str) -> SharedWeights:
        """Take over a file that another process of this node wrote, and its removal."""
        adopted = cls.__new__(cls)
        adopted._folder = SharedFolder.join(Path(path).parent, must_exist=True)
        return adopted

    @classmethod
    def of_bytes(cls, raw: Any) -> SharedWeights:
        """Write the bytes of a file of another node (`file_bytes`); refuse damaged ones."""
        made = cls.__new__(cls)
        with made._new_file(len(raw)) as file:
            file.write(memoryview(raw))
        try:
            seed, sent = read_fingerprints(str(made.path))
            for name, tensor in read_weights(str(made.path)):
                if fingerprint(tensor, seed) != sent[name][1]:
                    raise ValueError(f"{name} was damaged on its way from another node")
        except BaseException:
            made.close()
            raise
        return made

    @property
    def path(self) -> Path:
        return self._folder.path / "weights"

    @contextmanager
    def _new_file(self, num_bytes: int) -> Iterator[IO[bytes]]:
        """Open the file of these weights to write it; remove it if that fails."""
        self._folder = SharedFolder.make("weights")
        try:
            with open_file(self.path, "xb+") as file:
                # Reserve the pages now: a full /dev/shm is an OSError here, not a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                yield file
        except BaseException:
            self.close()
            raise

    def manifest(self) -> dict[str, Any]:
        """Return what an engine needs to load these weights."""
        return {"path": str(self.path)}

    def close(self) -> None:
        """Remove the file."""
        self._folder.remove()

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def file_bytes(path: str) -> Any:
    """Return the bytes of a file in shared memory as a numpy array over its pages.

    Ray ships an array unchanged, out of band. It would pickle tensors, with a copy of each.
    """
    return torch.frombuffer(_mapped(path), dtype=torch.uint8).numpy()


def read_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of all weights in a shared-memory file.

    The tensors are views of the mapping: loaders must copy out of them.
    """
    mapping, header, start = _open(path)
    for entry in header["tensors"]:
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        count = math.prod(shape)
        if count == 0:
            yield entry["name"], torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + entry["offset"])
        yield entry["name"], flat.view(shape)


def read_fingerprints(path: str) -> tuple[int, dict[str, tuple[str, Fingerprint]]]:
    """Return the seed of a shared-memory file, and the dtype and fingerprint of its tensors."""
    _, header, _ = _open(path)
    entries = header["tensors"]
    found = {e["name"]: (e["dtype"], Fingerprint(*e["fingerprint"])) for e in entries}
    return header["seed"], found


def _mapped(path: str) -> mmap.mmap:
    with open_file(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _open(path: str) -> tuple[mmap.mmap, dict[str, Any], int]:
    """Map a file; return its pages, its header, and the offset of the first tensor."""
    mapping = _mapped(path)
    if mapping[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} holds no weights of this format")
    body = len(_MAGIC) + 8
    length = int.from_bytes(mapping[len(_MAGIC) : body], "little")
    header: dict[str, Any] = json.loads(mapping[body : body + length])
    return mapping, header, -(-(body + length) // ALIGNMENT) * ALIGNMENT


def check_weights(path: str, folder: Path, whole: bool) -> None:
    """Refuse weights in a file whose names or shapes differ from the model in `folder`."""
    check_shapes(((name, list(t.shape)) for name, t in read_weights(path)), folder, whole)


def check_shapes(shapes: Iterable[tuple[str, list[int]]], folder: Path, whole: bool) -> None:
    """Refuse weights whose names or shapes differ from the model in `folder`.

    With `whole`, refuse an incomplete set too: vLLM would leave the missing part of a fused matrix
    uninitialized.
    """
    expected: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        expected |= {name: entry["shape"] for name, entry in header.items() if "shape" in entry}
    given = set()
    for name, shape in shapes:
        given.add(name)
        # A tied head may be among the weights although the folder does not hold it.
        if expected and name not in expected and name != "lm_head.weight":
            raise ValueError(f"weights hold {name!r}, which the model in {folder} does not have")
        if name in expected and shape != expected[name]:
            raise ValueError(
                f"weights hold {name!r} of shape {shape}, but the model in {folder} has "
                f"{expected[name]}"
            )
    needed = expected.keys() - given - {"lm_head.weight"}
    missing = [name for name in needed if name.endswith((".weight", ".bias"))]
    if whole and missing:
        raise ValueError(
            f"weights lack {min(missing)!r} and {len(missing) - 1} others that the model in "
            f"{folder} has; pass all of them"
        )
