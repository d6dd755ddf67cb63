"""Cores for engines: each engine claims its own, and the kernel frees the cores of a dead process.

A claim is a lock on a small file, held by the process. The kernel drops the lock however the
process ends, so the cores of a killed engine are free for its successor without any clean-up. Each
node has its own files; no coordinator is involved.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from tlt.errors import EngineError
from tlt.node.shared import SharedFolder

_held: dict[int, IO[bytes]] = {}


def claim_cores(count: int, group: str = "engines", wait_s: float = 10.0) -> tuple[int, ...]:
    """Lock `count` cores of this machine for this process, and return them.

    Wait up to `wait_s` for a dying process to free its cores. Processes of different groups may
    share a core.
    """
    own = SharedFolder.join(Path(tempfile.gettempdir()) / f"tlt-cores-{os.geteuid()}")
    folder = own.path / group
    folder.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise EngineError(
            f"an engine wants {count} cores but this process may use {len(cores)}; "
            f"set engine.num_cores = {len(cores)} or less"
        )
    deadline = time.monotonic() + wait_s
    claimed: list[int] = []
    while True:
        for core in cores:
            if len(claimed) < count and core not in _held and _lock(folder / str(core), core):
                claimed.append(core)
        if len(claimed) == count:
            return tuple(claimed)
        if time.monotonic() > deadline:
            release_cores(claimed)
            raise EngineError(
                f"no {count} free cores: other engines hold them; start fewer engines "
                f"(pool.num_engines x engine.num_cores <= {len(cores)})"
            )
        time.sleep(0.05)


def bind_process(cores: Iterable[int]) -> None:
    """Bind all present and future threads of this process to these cores."""
    cores = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that just ended
            os.sched_setaffinity(int(thread.name), cores)


def release_cores(cores: Iterable[int]) -> None:
    """Free cores that this process has claimed."""
    for core in cores:
        _held.pop(core).close()


def _lock(path: Path, core: int) -> bool:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    _held[core] = file
    return True
