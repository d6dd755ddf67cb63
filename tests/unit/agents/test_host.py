"""Tool processes: what they answer, and what a tool that hangs or dies costs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pebble")
psutil = pytest.importorskip("psutil")

from tlt.agents.environment import Answer  # noqa: E402
from tlt.agents.host import ToolHost  # noqa: E402
from tlt.config.tasks import ToolsConfig  # noqa: E402
from tlt.tasks.gym import Problem  # noqa: E402
from tlt.tasks.processes import Fault  # noqa: E402
from tool_acts import call  # noqa: E402

ACTS = "tool_acts:Acts"


@contextmanager
def hosting(folder: Path, **settings: Any) -> Iterator[ToolHost]:
    config = ToolsConfig(**{"num_workers": 2, "timeout_s": 10.0} | settings)
    host = ToolHost(config, "no model", folder / "tools")
    try:
        yield host
    finally:
        host.close()


def problem(folder: Path, **columns: Any) -> Problem:
    return Problem("p", "?", "4", entry={"log": str(folder / "calls.txt"), **columns})


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().split() if path.exists() else []


async def ask(host: ToolHost, sample: str, turn: int, state: bytes, text: str) -> Answer:
    return await host.answer(ACTS, "1", sample, turn, state, text)


async def test_answers_hang_crash_and_fail_and_the_rest_goes_on(tmp_path: Path) -> None:
    with hosting(tmp_path, timeout_s=2.0) as host:
        begun = await host.begin(ACTS, "1", 0, problem(tmp_path, greeting="Hello."))
        assert begun.messages == ("Hello.",)
        texts = {
            "plain": (call("count"), "call 1"),
            "hang": (call("wait", seconds=60), "error: the tool took more than 2 s"),
            "crash": (call("crash"), "error: the tool its process ended, with -9"),
            "fail": (call("leave"), "error: SystemExit: 3"),
            "unkept": (call("keep_open"), "error: TypeError: cannot pickle"),
            "again": (call("later"), "later 1"),
        }
        done = await asyncio.gather(
            *(ask(host, name, 1, begun.state, text) for name, (text, _) in texts.items())
        )
        for (name, (_, expected)), answer in zip(texts.items(), done, strict=True):
            assert answer.messages[0].startswith(expected), name
            assert answer.num_errors == expected.startswith("error")
            assert not answer.done
        slow = dict(zip(texts, done, strict=True))["hang"]
        assert 2.0 < slow.seconds < 10
        assert slow.state == begun.state, "the environment is as it was before the call"
        made = sorted(calls(tmp_path))
        assert made == ["count", "crash", "later", "wait"], "nothing is called again"
        again = [await ask(host, name, 1, begun.state, texts[name][0]) for name in texts]
        assert again == done
        assert sorted(calls(tmp_path)) == made


async def test_a_resumed_run_reads_the_answers(tmp_path: Path) -> None:
    with hosting(tmp_path) as host:
        begun = await host.begin(ACTS, "1", 0, problem(tmp_path))
        first = await ask(host, "a", 1, begun.state, call("count"))
    with hosting(tmp_path) as host:
        assert await host.begin(ACTS, "1", 0, problem(tmp_path)) == begun
        assert await ask(host, "a", 1, begun.state, call("count")) == first
        assert calls(tmp_path) == ["count"]
        host.forget(1)
        await ask(host, "a", 1, begun.state, call("count"))
        assert calls(tmp_path) == ["count", "count"], "no run does RL step 1 again"


async def test_a_problem_that_an_environment_does_not_take_is_a_fault(tmp_path: Path) -> None:
    with hosting(tmp_path, timeout_s=2.0) as host:
        with pytest.raises(Fault, match="missing 1 required positional argument: 'log'"):
            await host.begin(ACTS, "1", 0, Problem("p", "?", "4"))
        with pytest.raises(Fault, match="cannot be sent to a process"):
            await host.begin(ACTS, "1", 1, problem(tmp_path, odd=lambda: 1))
        with pytest.raises(Fault, match="no_such_module"):
            await host.begin("no_such_module:A", "1", 2, problem(tmp_path))
        assert (await host.begin(ACTS, "1", 3, problem(tmp_path))).messages == ()


async def test_a_reset_whose_process_dies_is_done_again_once(tmp_path: Path) -> None:
    with hosting(tmp_path) as host:
        once = problem(tmp_path, dies=str(tmp_path / "died"), greeting="Hello.")
        assert (await host.begin(ACTS, "1", 0, once)).messages == ("Hello.",)
        always = problem(tmp_path, dies=str(tmp_path / "no folder" / "died"))
        with pytest.raises(Fault, match="its process ended, with -9"):
            await host.begin(ACTS, "1", 1, always)


PARENT = """
import asyncio, sys
from pathlib import Path
from tlt.agents.host import ToolHost
from tlt.config.tasks import ToolsConfig
from tlt.tasks.gym import Problem
from tool_acts import call

async def main():
    folder = Path(sys.argv[1])
    host = ToolHost(ToolsConfig(num_workers=1), "no model", folder / "tools")
    problem = Problem("p", "?", "4", entry={"log": str(folder / "calls.txt")})
    begun = await host.begin("tool_acts:Acts", "1", 0, problem)
    await host.answer("tool_acts:Acts", "1", "a", 1, begun.state, call("wait", seconds=3))

if __name__ == "__main__":
    asyncio.run(main())
"""


def wait_for(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


async def test_a_call_outlives_a_killed_driver_and_is_not_made_again(tmp_path: Path) -> None:
    """The next run meets the call under way, and waits for its answer."""
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)], env=environment
    )
    assert wait_for(lambda: calls(tmp_path) == ["wait"])
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    with hosting(tmp_path) as host:
        begun = await host.begin(ACTS, "1", 0, problem(tmp_path))
        answer = await ask(host, "a", 1, begun.state, call("wait", seconds=3))
    assert answer.messages == ("waited",)
    assert answer.seconds > 2.9
    assert calls(tmp_path) == ["wait"]
    assert not psutil.wait_procs(workers, timeout=15)[1], "the workers end after their call"


async def test_a_call_outlives_the_step_that_was_abandoned(tmp_path: Path) -> None:
    """A signal ends a run: calls that the processes have end in their time, and no others start.

    A cancelled call might run already, and its answer would be lost.
    """
    with hosting(tmp_path, num_workers=1) as host:
        begun = await host.begin(ACTS, "1", 0, problem(tmp_path))
        left = [
            asyncio.ensure_future(ask(host, name, 1, begun.state, call("wait", seconds=1)))
            for name in "abcd"
        ]
        assert await asyncio.to_thread(wait_for, lambda: calls(tmp_path) == ["wait"])
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 8
    assert len(calls(tmp_path)) == 2, "a process has a call and the next one"
    with hosting(tmp_path, num_workers=1) as host:
        for name in "ab":
            again = await ask(host, name, 1, begun.state, call("wait", seconds=1))
            assert again.messages == ("waited",)
    assert len(calls(tmp_path)) == 2


async def test_a_close_ends_a_call_that_hangs(tmp_path: Path) -> None:
    with hosting(tmp_path, timeout_s=2.0) as host:
        begun = await host.begin(ACTS, "1", 0, problem(tmp_path))
        left = asyncio.ensure_future(ask(host, "a", 1, begun.state, call("wait", seconds=60)))
        assert await asyncio.to_thread(wait_for, lambda: calls(tmp_path) == ["wait"])
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 8


CARELESS = "tool_acts:Careless"


async def careless(host: ToolHost, sample: str, state: bytes, text: str) -> Answer:
    return await host.answer(CARELESS, "1", sample, 1, state, text)


async def test_a_tool_may_change_the_folder_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stays where it was, also for a relative `run.out`, and others notice nothing."""
    for name in ("kept", "gone"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with hosting(Path("run"), num_workers=1) as host:
        begun = await host.begin(CARELESS, "1", 0, problem(tmp_path))
        for name in ("kept", "gone"):
            text = call("enter", folder=str(tmp_path / name))
            assert (await careless(host, name, begun.state, text)).messages == ("in 1",)
            assert (await careless(host, name, begun.state, text)).messages == ("in 1",)
        (tmp_path / "gone").rmdir()
        innocent = await careless(host, "innocent", begun.state, call("count"))
        assert innocent.messages == ("call 1",)
    assert calls(tmp_path) == ["enter", "enter", "count"]
    assert not list((tmp_path / "kept").iterdir())


async def test_a_process_that_can_open_no_file_is_replaced(tmp_path: Path) -> None:
    with hosting(tmp_path, num_workers=1, timeout_s=30.0) as host:
        begun = await host.begin(CARELESS, "1", 0, problem(tmp_path))
        spent = await careless(host, "a", begun.state, call("exhaust"))
        assert spent.messages == ("error: the tool its process ended, with 1",)
        assert (await careless(host, "b", begun.state, call("count"))).messages == ("call 1",)
    assert calls(tmp_path) == ["exhaust", "count"]


async def test_what_a_hanging_tool_started_ends_with_it(tmp_path: Path) -> None:
    with hosting(tmp_path, num_workers=1, timeout_s=3.0) as host:
        begun = await host.begin(CARELESS, "1", 0, problem(tmp_path))
        hung = await careless(host, "a", begun.state, call("start"))
        assert hung.messages == ("error: the tool took more than 3 s",)
    (started,) = calls(tmp_path)
    assert wait_for(lambda: not psutil.pid_exists(int(started)))


SLOW = """
import time

time.sleep(2.5)

from tool_acts import Acts
"""


async def test_the_import_of_an_environment_has_a_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a hang, which costs a process, would cost the next trajectory its answer too."""
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    name, config = "slow_to_import:Acts", ToolsConfig(num_workers=1, timeout_s=2.0)
    host = ToolHost(config, "no model", tmp_path / "tools", name)
    try:
        begun = await host.begin(name, "1", 0, problem(tmp_path))
        for sample, text, expected in (
            ("a", call("count"), "call 1"),
            ("b", call("wait", seconds=60), "error: the tool took more than 2 s"),
            ("c", call("count"), "call 1"),
        ):
            answer = await host.answer(name, "1", sample, 1, begun.state, text)
            assert answer.messages == (expected,)
    finally:
        host.close()
