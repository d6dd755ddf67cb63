"""Folders in shared memory that belong to one user and live as long as a process uses them.

    /dev/shm/tlt-1000/                         one folder per user, mode 0700
        first-3f9a21c05b7e-samples/            the buffer of captured samples of a run
        first-3f9a21c05b7e-weights-5d0c41e2/   one version of weights

A name begins with the run's id, which is new at every start: two runs never share a folder, even
where both have the same `run.out` (two containers). Every process that uses a folder holds a shared
lock on it. The kernel drops the lock however the process ends, and knows no process ids: a process
in another pid namespace counts as well. A folder that no process holds is abandoned, and the next
process that makes one removes it.

No function here follows a symbolic link, or uses a folder that another user could change.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from tlt.errors import ConfigError

MEMORY = Path("/dev/shm")
RUN_ID = "TLT_RUN_ID"
"""Environment variable that tells the processes of a run its id."""
_NO_RUN = f"alone-{secrets.token_hex(6)}"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_UNKNOWN_UID = 65534
"""Owner, inside a container, of what a user outside of it owns, such as the host's /dev/shm."""


def begin_run(out: str) -> str:
    """Choose the id of a run that starts in this process, and return it."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(out).resolve().name)[:40].strip("-.")
    os.environ[RUN_ID] = f"{name or 'run'}-{secrets.token_hex(6)}"
    return os.environ[RUN_ID]


def run_id() -> str:
    """Return the id of the run that this process belongs to."""
    return os.environ.get(RUN_ID, _NO_RUN)


def run_environment() -> dict[str, str]:
    """Return the environment that makes another process one of this run."""
    return {RUN_ID: run_id()}


def user_folder(memory: Path = MEMORY) -> Path:
    """Return the path of this user's folder on a memory file system."""
    return memory / f"tlt-{os.geteuid()}"


class SharedFolder:
    """A folder in shared memory, held by this process until `remove`, or while this object lives.

    Other processes of the same user may hold it too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._release = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls, kind: str, memory: Path = MEMORY) -> SharedFolder:
        """Make a new folder for this user."""
        return cls.join(user_folder(memory) / f"{run_id()}-{kind}-{secrets.token_hex(4)}")

    @classmethod
    def join(cls, path: Path, must_exist: bool = False) -> SharedFolder:
        """Hold a folder; make it unless it exists, private to this user.

        Remove abandoned folders next to it first.
        """
        memory = path.parent.parent
        if not must_exist and path.parent == user_folder(memory):
            remove_abandoned(memory)
        while True:
            with _opened_parent(path, must_exist) as parent:
                if not must_exist:
                    with suppress(FileExistsError):
                        os.mkdir(path.name, 0o700, dir_fd=parent)
                try:
                    descriptor = _open_folder(path, parent)
                except FileNotFoundError:
                    if must_exist:
                        raise
                    continue  # removed as abandoned before it was held
                try:
                    _make_private(path, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    if _is_at(descriptor, path.name, parent):
                        return cls(path, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)

    def remove(self) -> None:
        """Remove the folder and its content, even if other processes hold it."""
        if self._release.alive:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()


def remove_abandoned(memory: Path = MEMORY) -> int:
    """Remove this user's folders that no process holds; return their number."""
    count = 0
    mine = user_folder(memory)
    try:
        descriptor = _open_folder(mine, None)
    except FileNotFoundError:
        return 0
    try:
        _make_private(mine, descriptor)
        for name in os.listdir(descriptor):  # noqa: PTH208, of the folder that was checked
            with suppress(OSError):  # removed meanwhile, held by a process, or not a folder
                count += _remove_unheld(name, descriptor)
    finally:
        os.close(descriptor)
    return count


def _remove_unheld(name: str, parent: int) -> bool:
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, name, parent):
            return False
        shutil.rmtree(name, dir_fd=parent)
        return True
    finally:
        os.close(descriptor)


def open_file(path: Path | str, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a binary file as `open` does, but refuse a symbolic link, and make private files."""

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    return cast(IO[bytes], open(path, mode, buffering, opener=open_private))


# --- folders that can be trusted ------------------------------------------------------------------


@contextmanager
def _opened_parent(path: Path, must_exist: bool) -> Iterator[int]:
    """Open the folder that holds `path`, which no other user may change."""
    parent = path.parent
    if not must_exist:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = _open_folder(parent, None)
    try:
        found = os.fstat(descriptor)
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        owners = {0, os.geteuid()} | ({_UNKNOWN_UID} if is_sticky else set())
        if found.st_uid not in owners:
            raise ConfigError(
                f"{parent} belongs to user {found.st_uid}, who could change its content; "
                "have it removed, or use your own folder"
            )
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            raise ConfigError(
                f"{parent} can be changed by all users, who could replace its content; "
                f"chmod +t {parent}, or use a folder that has this bit, such as /dev/shm"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: Path, parent: int | None) -> int:
    try:
        return os.open(path if parent is None else path.name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ConfigError(
            f"{path} is a symbolic link or a file, not a folder; another user may have put it "
            "there to reach your files; remove it, or use another folder"
        ) from None


def _make_private(path: Path, descriptor: int) -> None:
    """Let only this user in; refuse another user's folder."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, not to you ({os.geteuid()}); have it removed, "
            "or use another folder"
        )
    if found.st_mode & 0o077:
        os.fchmod(descriptor, 0o700)


def _is_at(descriptor: int, name: str, parent: int) -> bool:
    """Return whether an open folder is still the one of this name."""
    try:
        there = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
