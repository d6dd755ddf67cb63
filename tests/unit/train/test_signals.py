"""SIGTERM and SIGINT, to processes of their own and to a step under way."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tlt.train.signals import finish_or_abandon

PROGRAM = """
import asyncio, sys, time
from tlt.errors import Terminated
from tlt.train.signals import Termination

async def work(term, kind):
    stop = asyncio.Event()
    with term.calling(stop.set):
        print("ready", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        if kind == "hangs":
            await asyncio.sleep(60)
        if kind == "blocks":
            time.sleep(60)
    term.raise_if_requested(" in good order")

try:
    with Termination(float(sys.argv[2])) as term:
        if sys.argv[1] == "early":
            print("ready", flush=True)
            time.sleep(60)
        asyncio.run(work(term, sys.argv[1]))
except Terminated as end:
    print(end, flush=True)
    sys.exit(end.exit_code)
"""


def start(kind: str, timeout_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, str(timeout_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("kind", ["obeys", "early"])
def test_a_signal_ends_the_process_in_good_order(kind: str, number: int, code: int) -> None:
    with start(kind, 60.0) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert f"ended by signal {number}" in output
    assert ("in good order" in output) == (kind == "obeys")


@pytest.mark.parametrize("kind", ["hangs", "blocks"])
def test_a_process_that_does_not_end_in_time_is_ended(kind: str) -> None:
    with start(kind, 0.3) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_second_signal_ends_at_once() -> None:
    with start("hangs", 60.0) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("may_abandon", [True, False])
async def test_a_step_is_abandoned_only_before_its_update(may_abandon: bool) -> None:
    stop = asyncio.Event()
    done: list[int] = []

    async def step() -> None:
        await asyncio.sleep(0.02)
        done.append(1)

    taking = asyncio.create_task(finish_or_abandon(step(), stop, lambda: may_abandon))
    await asyncio.sleep(0)
    stop.set()
    assert await taking is not may_abandon
    assert done == ([] if may_abandon else [1])


async def test_without_a_signal_a_step_ends_as_it_does() -> None:
    async def good() -> None: ...

    async def bad() -> None:
        raise KeyError("lost")

    stop = asyncio.Event()
    assert await finish_or_abandon(good(), stop, lambda: True)
    with pytest.raises(KeyError):
        await finish_or_abandon(bad(), stop, lambda: True)


async def test_a_cancelled_run_cancels_its_step() -> None:
    ended = asyncio.Event()

    async def step() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    taking = asyncio.create_task(finish_or_abandon(step(), asyncio.Event(), lambda: True))
    await asyncio.sleep(0.01)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert ended.is_set()
