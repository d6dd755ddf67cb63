"""The journal of a run's tool calls: one file per turn of a trajectory.

An answer is written before it is used. A run that was killed generates its trajectories again,
token for token, and finds the answers here: no tool is called twice for one turn. A process that is
about to call holds a lock and leaves a mark. A process that finds the mark waits for the lock. If
there is still no answer then, the process died with the call, and the trajectory reads that the
answer was lost.

The files hold pickled environments, and belong to the run's user.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tlt.agents.environment import Answer, readable

LOST = "error: the answer of this tool was lost"


def entry(folder: Path, sample_id: str, turn: int, text: str) -> Path:
    """Return the file of a turn; another text at the same place is another call."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return folder / sample_id.replace("/", "-") / f"{turn}-{digest}.json"


def answered_once(path: Path, state: bytes, work: Callable[[], Answer]) -> Answer:
    """Return the answer in the journal, or do the work and write its answer there first.

    `state` is the environment before the call, for an answer that was lost.
    """
    if (found := read(path)) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".begun").open("a+b") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        if (found := read(path)) is not None:
            return found
        if mark.seek(0, os.SEEK_END):
            return settle(path, lost(state))
        mark.write(b"begun\n")
        mark.flush()
        return settle(path, work())


def kept(path: Path, work: Callable[[], Answer]) -> Answer:
    """Return the answer in the journal, or the answer of work that may be done twice."""
    return read(path) or settle(path, work())


def lost(state: bytes, why: str = LOST) -> Answer:
    """Return the answer of a call whose own answer was lost."""
    return Answer((readable(why),), state, done=False, reward=None, num_errors=1)


def settle(path: Path, answer: Answer) -> Answer:
    """Write an answer unless the journal has one, and return the journal's."""
    said = asdict(answer) | {"state": base64.b64encode(answer.state).decode()}
    written = path.with_suffix(f".{os.getpid()}")
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps(said))
    try:
        os.link(written, path)
    except FileExistsError:
        pass
    finally:
        written.unlink()
    found = read(path)
    assert found is not None
    return found


def read(path: Path) -> Answer | None:
    """Return the answer of a turn, if there is one."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    state = base64.b64decode(said["state"])
    return Answer(**said | {"messages": tuple(said["messages"]), "state": state})


def forget(folder: Path, step: int) -> None:
    """Remove the answers of RL steps up to this one, which no run does again; of none if it is 0.

    Before the first checkpoint a run may do the evaluation of RL step 0 again.
    """
    if step == 0:
        return
    for each in folder.glob("*"):
        number = each.name.removeprefix("eval-").split("-")[0]
        if number.isdigit() and int(number) <= step:
            shutil.rmtree(each, ignore_errors=True)
