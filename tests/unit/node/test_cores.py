"""Cores are claimed by one process at a time, and freed when it ends."""

import multiprocessing
import os
import signal
import uuid
from multiprocessing.connection import Connection

import pytest

from tlt.errors import EngineError
from tlt.node.cores import claim_cores, release_cores


def _hold(group: str, pipe: Connection) -> None:
    pipe.send(claim_cores(len(os.sched_getaffinity(0)), group))
    signal.pause()


def test_claims_exclude_each_other_and_die_with_their_process() -> None:
    group = f"test-{uuid.uuid4().hex}"
    everything = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(group, theirs))
    holder.start()
    assert len(mine.recv()) == everything
    with pytest.raises(EngineError, match="start fewer engines"):
        claim_cores(1, group, wait_s=0.1)
    release_cores(claim_cores(1, f"test-{uuid.uuid4().hex}"))  # another group may share
    assert holder.pid
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    cores = claim_cores(everything, group)
    release_cores(cores)


def test_more_cores_than_there_are() -> None:
    with pytest.raises(EngineError, match=r"engine\.num_cores = "):
        claim_cores(10_000)
