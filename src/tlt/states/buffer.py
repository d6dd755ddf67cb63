"""A node's buffer of captured samples, in shared memory, that no crash can corrupt.

The buffer is a folder on a memory file system, with one file per sample. A writer writes a sample
to a hidden file and makes it visible by a rename. A writer killed half-way leaves nothing but a
hidden file, which the next writer removes. Readers map the file: they copy nothing, lock nothing,
and leave nothing to clean up when they die. A mapping outlives the eviction of its file. The
folder's listing is the index: file names carry the RL step, the number of learned tokens, and
whether the sample is held out. The folder is private to its user (`tlt.node.shared`).

Writers take turns at making room: each one reserves a hidden file of its sample's size. They write
at the same time. A writer holds a lock on its hidden file, which the kernel drops when the writer
dies. The bytes of all files, hidden ones included, never exceed the capacity. To make room, the
buffer evicts the samples with the fewest learned tokens first, and a sample of an earlier RL step
counts for less. A session in the middle of a rollout thus finds the previous RL step's long samples
and the current one's short samples. Training draws by the same worth.

A sample's targets are its last hidden states times the policy's head, and trainers have only the
head of the current policy. Samples more than `MAX_AGE_STEPS` RL steps old are worth nothing: no
trainer gets them, and they make room first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open

from tlt.config.train import CaptureConfig
from tlt.errors import ConfigError
from tlt.node.shared import SharedFolder, open_file, run_id, user_folder
from tlt.states.captured import Captured, Offer

SUFFIX = ".sample"
LOCK = ".lock"
HEADER_BYTES = 4096
"""Allowance for a file's header when room is made for the file."""
_DTYPES = {torch.int32: "I32", torch.bfloat16: "BF16", torch.bool: "BOOL"}
HALF_LIFE_STEPS = 2.0
"""RL steps after which a sample counts for half its length."""
MAX_AGE_STEPS = 4
"""RL steps after which states of an old policy no longer go with the head of the current one."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """Where a node's buffer is and what it may hold; `capture` in a run's config."""

    folder: str
    """Folder on a memory file system, such as /dev/shm/my-states; the buffer makes it private."""
    capacity_bytes: int
    """Largest total size of the folder's files."""
    max_sample_tokens: int
    """Longest sample stored whole. Of a longer sample the buffer stores a window of this size, at
    its true positions."""
    held_out_share: float = 1 / 8
    """Share of the samples held out for evaluation, chosen by a hash of their id. Without any, no
    drafter can be evaluated, and so none published."""

    @classmethod
    def of_run(cls, capture: CaptureConfig) -> BufferSettings:
        """Return the buffer of every node of this run; a resumed run has another one."""
        return cls(
            folder=str(user_folder(Path(capture.folder)) / f"{run_id()}-samples"),
            capacity_bytes=int(capture.capacity_gib * 2**30),
            max_sample_tokens=capture.max_sample_tokens,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """The facts in a file's name."""

    name: str
    rl_step: int
    num_learned: int
    num_tokens: int
    held_out: bool

    @classmethod
    def parse(cls, name: str) -> Entry:
        """Read the facts from a file's name."""
        step, learned, tokens, held_out, _ = name.removesuffix(SUFFIX).split("-", 4)
        return cls(name, int(step), int(learned), int(tokens), held_out == "h")

    def worth(self, latest_step: int) -> float:
        """Return the learned tokens, which count for less with age and in the end for nothing."""
        age = latest_step - self.rl_step
        return self.num_learned * 0.5 ** (age / HALF_LIFE_STEPS) if age <= MAX_AGE_STEPS else 0.0


def _write(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors in the format of safetensors into an open file, and cut the file there.

    The library's own function writes to a path, by way of another file.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(struct.pack("<Q", len(text)) + text)]
    parts += [memoryview(t.contiguous().view(torch.uint8).numpy()) for t in tensors.values()]
    for part in parts:
        part = part.cast("B")
        while part:
            part = part[file.write(part) :]
    file.truncate(file.tell())


def _digest(sample_id: str, rl_step: int) -> str:
    """Return a hash that decides what happens to a sample, the same in every process."""
    return hashlib.blake2b(f"{rl_step}/{sample_id}".encode(), digest_size=8).hexdigest()


def _newest_first(entry: Entry) -> tuple[int, str]:
    """Sort by RL step, then by hash: every RL step then offers samples of all lengths."""
    return -entry.rl_step, entry.name[-16 - len(SUFFIX) :]


class SampleBuffer:
    """The buffer, as one process sees it. Any process of the node may open it, to read or write."""

    def __init__(self, settings: BufferSettings) -> None:
        if settings.capacity_bytes < HEADER_BYTES:
            raise ConfigError(
                f"buffer.capacity_bytes = {settings.capacity_bytes} holds no sample; e.g. "
                f"{2**30} (1 GiB)"
            )
        self.settings = settings
        self._held = SharedFolder.join(Path(settings.folder))
        self._folder = self._held.path

    # --- writing ------------------------------------------------------------------------------

    def put(self, sample_id: str, rl_step: int, sample: Captured) -> bool:
        """Store a sample and return whether it was stored.

        The buffer refuses samples that are too large, that are worth less than the samples they
        would evict, or that have no learned tokens.
        """
        sample = self.capped(sample_id, rl_step, sample)
        num_learned = int(sample.loss_mask_T.sum())
        if num_learned == 0:
            return False
        digest = _digest(sample_id, rl_step)
        mark = "h" if int(digest[:8], 16) / 2**32 < self.settings.held_out_share else "t"
        name = f"{rl_step:08d}-{num_learned:06d}-{len(sample):06d}-{mark}-{digest}{SUFFIX}"
        tensors = {
            "token_ids": sample.token_ids_T.to("cpu", torch.int32),
            "aux": sample.aux_TA.to("cpu", torch.bfloat16),
            "final": sample.final_TH.to("cpu", torch.bfloat16),
            "loss_mask": sample.loss_mask_T.to("cpu", torch.bool),
        }
        num_bytes = HEADER_BYTES + sum(t.nbytes for t in tensors.values())
        hidden = self._folder / f".{name}.{secrets.token_hex(4)}"
        with self._making_room():
            if not self._make_room(num_bytes, Entry.parse(name)):
                return False
            file = open_file(hidden, "xb", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(num_bytes)
        with file:
            try:
                _write(file, tensors, {"first_position": str(sample.first_position)})
                hidden.rename(self._folder / name)
            except BaseException:
                hidden.unlink(missing_ok=True)
                raise
        return True

    def clear(self) -> None:
        """Remove all samples."""
        with self._making_room():
            for path in self._folder.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    # --- snapshots ----------------------------------------------------------------------------

    def copy_to(self, folder: Path, last_step: int, earlier: Path | None = None) -> None:
        """Copy the samples up to an RL step to disk; link samples that an earlier copy holds."""
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self.entries():
            if entry.rl_step > last_step:
                continue
            try:
                os.link((earlier or folder) / entry.name, folder / entry.name)
            except OSError:  # not there, or the file system has no links
                with suppress(FileNotFoundError):  # evicted meanwhile
                    shutil.copy(self._folder / entry.name, folder / entry.name)

    def restore_from(self, folder: Path | None) -> None:
        """Replace all samples by a copy's, or by none without a copy."""
        self.clear()
        with self._making_room():
            for file in folder.glob(f"*{SUFFIX}") if folder else ():
                hidden = self._folder / f".{file.name}"
                hidden.unlink(missing_ok=True)
                with file.open("rb") as saved, open_file(hidden, "xb") as copy:
                    shutil.copyfileobj(saved, copy)
                hidden.rename(self._folder / file.name)

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        """Hold the writers' common lock, and remove the leftovers of writers that died."""
        with open_file(self._folder / LOCK, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in self._names():
                if name[0] == "." and name != LOCK:
                    # A living writer holds its file, or has just renamed it.
                    with (
                        suppress(BlockingIOError, FileNotFoundError),
                        open_file(self._folder / name, "rb") as file,
                    ):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        (self._folder / name).unlink()
            yield

    def _make_room(self, num_bytes: int, new: Entry) -> bool:
        (self._folder / new.name).unlink(missing_ok=True)  # the same sample, captured again
        sizes = {entry: self._size(entry.name) for entry in self.entries()}
        excess = self.num_bytes() + num_bytes - self.settings.capacity_bytes
        latest = max([new.rl_step, *(entry.rl_step for entry in sizes)])
        evicted = []
        for entry in sorted(sizes, key=lambda e: (e.worth(latest), e.name)):
            if excess <= 0 or entry.worth(latest) > new.worth(latest):
                break
            evicted.append(entry)
            excess -= sizes[entry]
        if excess > 0:
            return False
        for entry in evicted:
            (self._folder / entry.name).unlink(missing_ok=True)
        return True

    def capped(self, sample_id: str, rl_step: int, sample: Captured) -> Captured:
        """Return the window of a sample that the buffer keeps.

        The window is a copy: it does not keep the rest of the sample.
        """
        if len(sample) <= self.settings.max_sample_tokens:
            return sample
        window = sample.window(*self.window(sample_id, rl_step, len(sample), sample.first_learned))
        return replace(window, aux_TA=window.aux_TA.clone(), final_TH=window.final_TH.clone())

    def window(
        self, sample_id: str, rl_step: int, num_tokens: int, first_learned: int
    ) -> tuple[int, int]:
        """Return where in a sample the window is: anywhere in a long response, to learn all
        depths."""
        size = self.settings.max_sample_tokens
        last = max(0, num_tokens - size)
        # The prompt may take at most half of the window.
        lowest = min(max(0, first_learned - size // 2), last)
        begin = lowest + int(_digest(sample_id, rl_step)[8:], 16) % (last - lowest + 1)
        return begin, min(begin + size, num_tokens)

    # --- reading ------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """List the visible samples."""
        return [Entry.parse(name) for name in self._names() if name[0] != "."]

    def _recent(self) -> dict[Entry, float]:
        """Return the worth of each sample whose states fit the current policy's head."""
        entries = self.entries()
        latest = max((entry.rl_step for entry in entries), default=0)
        return {e: e.worth(latest) for e in entries if latest - e.rl_step <= MAX_AGE_STEPS}

    def offers(self) -> dict[str, Offer]:
        """Return the samples to train on, by name; recent and long ones weigh more."""
        recent = self._recent().items()
        return {e.name: Offer(e.num_tokens, worth) for e, worth in recent if not e.held_out}

    def held_out(self, max_tokens: int) -> list[Captured]:
        """Return the newest held-out samples, with at most `max_tokens` learned tokens in all."""
        chosen = []
        for entry in sorted(self._recent(), key=_newest_first):
            sample = self.read(entry.name) if entry.held_out and max_tokens > 0 else None
            if sample is not None:
                too_many = max(0, entry.num_learned - max_tokens)
                chosen.append(sample.window(0, len(sample) - too_many))
                max_tokens -= entry.num_learned
        return chosen

    def read(self, name: str) -> Captured | None:
        """Map a sample, or return None when it has been evicted meanwhile."""
        try:
            with safe_open(self._folder / name, "pt") as file:
                return Captured(
                    token_ids_T=file.get_tensor("token_ids").long(),
                    loss_mask_T=file.get_tensor("loss_mask"),
                    aux_TA=file.get_tensor("aux"),
                    final_TH=file.get_tensor("final"),
                    first_position=int(file.metadata()["first_position"]),
                )
        except FileNotFoundError:
            return None

    def num_bytes(self) -> int:
        """Return the size of all files, visible or hidden."""
        return sum(self._size(name) for name in self._names())

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as files:
            return [file.name for file in files if file.is_file(follow_symlinks=False)]

    def _size(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return 0
