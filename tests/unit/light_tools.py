"""Tool processes in simulated time, behind a layer of faults, and an environment for them.

The journal and what calls an environment are real. A process may die of a call, before or after the
tool was called; may hang; or may answer too late. The policy reads of that, so a run under faults
equals an undisturbed run in which the same answers were lost (`Tools.lost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest import mock

from fault_layer import Layer
from light_ranks import digest
from light_tasks import ToolChat

from tlt.agents import host, journal
from tlt.agents.environment import Answer
from tlt.config.tasks import ToolsConfig
from tlt.contracts import SampleRequest
from tlt.tasks.processes import Fault
from tool_acts import call

HANGS = '"hang"'
"""Part of a turn's text whose call never ends."""
SETTINGS = {"timeout_s": 4.0, "max_turns": 4, "num_workers": 3, "max_answer_tokens": 60}
Turn = tuple[str, str, int]
"""Label, sample and number of a turn."""


class Notebook:
    """The environment. Its state follows from all calls before."""

    called: ClassVar[Callable[[], None]]

    def reset(self, question: str) -> str | None:
        self.known = digest(question)
        return f"{self.known % 100}" if self.known % 3 == 0 else None

    def note(self, what: int) -> str:
        """Note a number."""
        Notebook.called()
        self.known = digest(self.known, what)
        return f"{self.known % 1000}"

    def fail(self, what: int) -> str:
        """Note a number, and fail."""
        Notebook.called()
        raise ValueError(f"{digest(self.known, what) % 1000}")


def draw(noise: random.Random, request: SampleRequest) -> tuple[int, ...]:
    """Draw a turn: calls of tools, an answer, or a call that cannot be read."""
    noise = random.Random(f"{noise.random()}/{digest(request.prompt_token_ids)}")
    tool = noise.choices(("note", "fail", "hang", "none", "", "bad"), (50, 8, 4, 2, 32, 4))[0]
    made = [
        call(tool, what=noise.randrange(99)) if tool else "" for _ in range(noise.randrange(1, 3))
    ]
    text = {"": f"so {noise.randrange(99)}", "bad": "<tool_call>no"}.get(tool, "".join(made))
    return ToolChat.turn(text)


class Died(BaseException):
    """The end of a process in the middle of a call."""


class Tools:
    """The tools of a whole run, its restarts included, and what must hold of them."""

    def __init__(self, layer: Layer, lost: dict[Turn, str] | None = None) -> None:
        self.layer = layer
        self.scripted = lost or {}
        """Answers that are lost, and what the policy reads instead."""
        self.lost: dict[Turn, str] = {}
        self.calls: Counter[Turn] = Counter()
        """How often the tools of a turn were called."""
        self.said: dict[Turn, Answer] = {}
        self.begun: set[str] = set()
        self.driver_dies: Callable[[], object] = bool
        self.driver_dies_at = 0
        """The call during which the driver is killed; 0 is none."""
        self.num_calls = 0
        self.under_way: dict[asyncio.Future[Any], Sequence[Callable[[], Any]]] = {}
        """Calls, and what may have become of each when the driver dies."""

    @contextlib.contextmanager
    def host(self, folder: Path) -> Iterator[LightHost]:
        """Yield the tools of one driver; their processes outlive it."""
        with mock.patch.object(host, "Processes", partial(Processes, self)):
            made = LightHost(ToolsConfig.model_validate(SETTINGS), "no model", folder)
        made.tools = self
        yield made
        for work, ends in list(self.under_way.items()):  # the driver was killed
            work.cancel()
            self.layer.rng.choice(ends)()
        self.under_way.clear()

    def check(self) -> None:
        twice = [turn for turn, count in self.calls.items() if count > 1]
        assert not twice, f"tools are called twice for {twice}"


class LightHost(host.ToolHost):
    """The tool host, watched."""

    tools: Tools

    async def answer(
        self, environment: str, label: str, sample_id: str, turn: int, state: bytes, text: str
    ) -> Answer:
        key = label, sample_id.replace("/", "-"), turn
        if (why := self.tools.scripted.get(key)) is not None:
            return journal.lost(state, why)
        said = await super().answer(environment, label, sample_id, turn, state, text)
        before = self.tools.said.setdefault(key, said)
        assert said.messages == before.messages, f"two answers at {key}"
        why = said.messages[0] if said.messages else ""
        is_lost = why == journal.LOST or why.startswith("error: the tool ")
        if is_lost and not (HANGS in text and "took more" in why):
            self.tools.lost[key] = why
        return said


class Processes:
    """`tlt.tasks.processes.Processes` in simulated time."""

    def __init__(
        self, tools: Tools, what: str, num_workers: int, timeout_s: float, *_: Any, **__: Any
    ) -> None:
        self._tools = tools
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(num_workers)

    async def call(self, function: Callable[..., Any], path: str, *args: Any) -> Any:
        layer, tools = self._tools.layer, self._tools
        async with self._places:
            fault = layer.fault()
            is_begin = function is host._begin
            if is_begin and fault:  # one that fails twice in a row rightly loses the problem
                fault = "" if path in tools.begun else "fail"
                tools.begun.add(path)
            work = asyncio.ensure_future(self._work(fault, function, path, args))
            # With the driver, it has not begun, ends all the same, or dies in the middle.
            ends: list[Callable[[], Any]] = [bool]
            if is_begin or HANGS not in args[2]:  # one that hangs never ends by itself
                ends.append(partial(self._run, function, path, args))
            if not is_begin:
                ends.append(partial(self._dies, path, args))
            tools.under_way[work] = ends
            tools.num_calls += 1
            if tools.num_calls == tools.driver_dies_at:
                soon_s = layer.rng.uniform(0, 0.3)
                asyncio.get_running_loop().call_later(soon_s, tools.driver_dies)
            await asyncio.wait({work}, timeout=self._timeout_s)
            tools.under_way.pop(work)
            if work.done():
                return work.result()
            work.cancel()
            raise Fault("timeout", f"took more than {self._timeout_s:g} s")

    async def _work(
        self, fault: str, function: Callable[..., Any], path: str, args: tuple[Any, ...]
    ) -> Any:
        rng, never = self._tools.layer.rng, asyncio.Event()
        seconds = min(rng.expovariate(3.0), 0.7 * self._timeout_s)
        await asyncio.sleep(seconds)
        if fault == "fail":  # the process dies before the call
            raise Fault("crash", "its process ended, with -9")
        if fault == "drop":
            await never.wait()
        if fault == "delay":
            await asyncio.sleep(rng.uniform(0, 1.5 * self._timeout_s))
        if function is host._answer and (fault in ("die", "hang") or HANGS in args[2]):
            self._dies(path, args)
            if fault == "die":
                raise Fault("crash", "its process ended, with -9")
            await never.wait()
        found = self._run(function, path, args)
        if fault == "duplicate":
            assert self._run(function, path, args) == found
        if fault == "fail_late":  # the answer is in the journal when the caller's time is over
            await never.wait()
        return found

    def _run(self, function: Callable[..., Any], path: str, args: tuple[Any, ...]) -> Any:
        turn, made = turn_of(path), [0]

        def called() -> None:
            made[0] = 1

        Notebook.called = staticmethod(called)
        found = function(path, *args)
        if function is host._answer:
            self._tools.calls[turn] += made[0]
        return found

    def _dies(self, path: str, args: tuple[Any, ...]) -> None:
        """Call the tool and leave what a process leaves that dies or hangs in it."""

        def dies() -> NoReturn:
            self._tools.calls[turn_of(path)] += 1
            raise Died

        with contextlib.suppress(Died):
            journal.answered_once(Path(path), args[1], dies)

    def close(self, wait_s: float = 0.0) -> None: ...


def turn_of(path: str) -> Turn:
    """Return the turn of a file in the journal."""
    *_, label, sample_id, name = Path(path).parts
    return label, sample_id, int(name.split("-")[0])
