"""A node's store of captured samples, in shared memory, that no crash can corrupt.

One file per sample in a folder on a memory file system. A sample is written to a hidden file and
becomes visible by a rename, so a writer killed half-way leaves nothing but a hidden file, which
the next writer removes. Readers map the file: no copy, no lock, nothing to clean up when they die;
a mapping outlives the eviction of its file. The folder's listing is the index: names carry what is
needed to choose (RL step, learned tokens, held out or not).

Writers take turns by a lock the kernel drops when they die. The bytes of all files, hidden ones
included, never exceed the capacity. To make room, the samples with the fewest learned tokens go
first, where a sample of an earlier RL step counts for less: a session in the middle of a rollout
finds the long samples of the step before beside the short ones of this step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tlt.errors import ConfigError
from tlt.states.captured import Captured

SUFFIX = ".sample"
LOCK = ".lock"
HEADER_BYTES = 4096
"""Allowance for a file's header when room is made for it."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    folder: str
    """On a memory file system, such as /dev/shm/tlt."""
    capacity_bytes: int = 2**30
    max_sample_tokens: int = 4096
    """Of longer samples a window of this size is kept, at its true positions."""
    half_life_steps: float = 2.0
    """After so many RL steps a sample counts for half its length when room is made."""
    held_out_share: float = 1 / 8
    """Samples set aside, chosen by a hash of their id: without any, no drafter can be judged, and
    so none published."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file's name says."""

    name: str
    rl_step: int
    num_learned: int
    num_tokens: int
    held_out: bool

    @classmethod
    def parse(cls, name: str) -> Entry:
        step, learned, tokens, held_out, _ = name.removesuffix(SUFFIX).split("-", 4)
        return cls(name, int(step), int(learned), int(tokens), held_out == "h")


def _newest_first(entry: Entry) -> tuple[int, str]:
    """Within an RL step in the order of the hashes, so that all lengths are there."""
    return -entry.rl_step, entry.name[-16 - len(SUFFIX) :]


class SampleBuffer:
    """Any process of the node may open the same folder, to write or to read."""

    def __init__(self, settings: BufferSettings) -> None:
        if settings.capacity_bytes < HEADER_BYTES:
            raise ConfigError(
                f"buffer.capacity_bytes = {settings.capacity_bytes} holds no sample; e.g. "
                f"{2**30} (1 GiB)"
            )
        self.settings = settings
        self._folder = Path(settings.folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    # --- writing ------------------------------------------------------------------------------

    def put(self, sample_id: str, rl_step: int, sample: Captured) -> bool:
        """Store a sample; False when it is too large or worth less than all it would replace."""
        digest = hashlib.blake2b(f"{rl_step}/{sample_id}".encode(), digest_size=8).hexdigest()
        sample = self._capped(sample, digest)
        num_learned = int(sample.loss_mask_T.sum())
        if num_learned == 0:
            return False
        share = int(digest[:8], 16) / 2**32
        mark = "h" if share < self.settings.held_out_share else "t"
        name = f"{rl_step:08d}-{num_learned:06d}-{len(sample):06d}-{mark}-{digest}{SUFFIX}"
        tensors = {
            "token_ids": sample.token_ids_T.to("cpu", torch.int32),
            "loss_mask": sample.loss_mask_T.to("cpu", torch.bool),
            "aux": sample.aux_TA.to("cpu", torch.bfloat16),
            "final": sample.final_TH.to("cpu", torch.bfloat16),
        }
        num_bytes = HEADER_BYTES + sum(t.numel() * t.element_size() for t in tensors.values())
        hidden = self._folder / f".{name}"
        with self._writing():
            if not self._make_room(num_bytes, Entry.parse(name)):
                return False
            save_file(
                {key: tensor.contiguous() for key, tensor in tensors.items()},
                hidden,
                {"first_position": str(sample.first_position)},
            )
            hidden.rename(self._folder / name)
        return True

    def clear(self) -> None:
        with self._writing():
            for path in self._folder.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    # --- snapshots ----------------------------------------------------------------------------

    def copy_to(self, folder: Path, last_step: int, earlier: Path | None = None) -> None:
        """Copy samples up to an RL step to disk; those that an earlier copy holds are linked."""
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
        """Hold exactly the samples of a copy; none when there is no copy."""
        self.clear()
        with self._writing():
            for file in folder.glob(f"*{SUFFIX}") if folder else ():
                hidden = self._folder / f".{file.name}"
                shutil.copy(file, hidden)
                hidden.rename(self._folder / file.name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time; what a dead one left behind is removed first."""
        with (self._folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in self._names():
                if name[0] == "." and name != LOCK:  # ours, or safetensors' own partial file
                    (self._folder / name).unlink(missing_ok=True)
            yield

    def _make_room(self, num_bytes: int, new: Entry) -> bool:
        (self._folder / new.name).unlink(missing_ok=True)  # the same sample, captured again
        sizes = {entry: self._size(entry.name) for entry in self.entries()}
        excess = sum(sizes.values()) + num_bytes - self.settings.capacity_bytes
        latest = max([new.rl_step, *(entry.rl_step for entry in sizes)])
        evicted = []
        for entry in sorted(sizes, key=lambda e: (self._worth(e, latest), e.name)):
            if excess <= 0 or self._worth(entry, latest) > self._worth(new, latest):
                break
            evicted.append(entry)
            excess -= sizes[entry]
        if excess > 0:
            return False
        for entry in evicted:
            (self._folder / entry.name).unlink(missing_ok=True)
        return True

    def _worth(self, entry: Entry, latest_step: int) -> float:
        age = latest_step - entry.rl_step
        return float(entry.num_learned * 0.5 ** (age / self.settings.half_life_steps))

    def _capped(self, sample: Captured, digest: str) -> Captured:
        """A window somewhere in a long response, so that all depths of it are learned."""
        size = self.settings.max_sample_tokens
        if len(sample) <= size:
            return sample
        # Of the prompt, at most what leaves half of the window to the response.
        lowest = min(max(0, sample.first_learned - size // 2), len(sample) - size)
        begin = lowest + int(digest[8:], 16) % (len(sample) - size - lowest + 1)
        return sample.window(begin, begin + size)

    # --- reading ------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        return [Entry.parse(name) for name in self._names() if name[0] != "."]

    def sizes(self) -> dict[str, int]:
        """Samples to train on."""
        return {e.name: e.num_tokens for e in self.entries() if not e.held_out}

    def held_out(self, max_tokens: int) -> list[Captured]:
        """Samples to judge by, the most recent first, with so many tokens of the policy in all."""
        chosen = []
        for entry in sorted(self.entries(), key=_newest_first):
            sample = self.read(entry.name) if entry.held_out and max_tokens > 0 else None
            if sample is not None:
                too_many = max(0, entry.num_learned - max_tokens)
                chosen.append(sample.window(0, len(sample) - too_many))
                max_tokens -= entry.num_learned
        return chosen

    def read(self, name: str) -> Captured | None:
        """Map a sample; None when it has been evicted meanwhile."""
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
        """Of all files, visible or not."""
        return sum(self._size(name) for name in self._names())

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as files:
            return [file.name for file in files]

    def _size(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return 0
