"""A user's class becomes tools, and what a policy writes becomes calls, without processes."""

from __future__ import annotations

import json
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tlt.agents.environment import (
    MAX_ERROR,
    NOT_TOOLS,
    Answer,
    answer,
    begin,
    environment_class,
    tagged_calls,
    tool_names,
    tool_schemas,
)
from tlt.errors import ConfigError
from tool_acts import Acts, call

TOOLS = ["count", "wait", "crash", "fail", "leave", "later", "win", "keep_open"]


class Shop:
    """An environment with all that is no tool beside its tools."""

    stock = 3
    reward = 0.5

    def reset(self, **problem: Any) -> None:
        self.problem = problem

    def buy(self, thing: str, number: int = 1) -> str:
        """Buy a thing.

        Args:
            thing: What to buy.
            number: How many.
        """
        return f"{number} {thing}"

    def _count(self) -> None: ...

    @staticmethod
    def worked(**problem: Any) -> list[str]:
        return []


class BiggerShop(Shop):
    def sell(self, things: list[str]) -> str:
        """Sell things.

        Args:
            things: What to sell.
        """
        return ", ".join(things)

    def buy(self, thing: str, number: int = 2) -> str:
        """Buy things.

        Args:
            thing: What to buy.
            number: How many.
        """
        return f"{number} {thing}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls.txt"


def begun(log: Path, **columns: Any) -> Answer:
    return begin(Acts, {"log": str(log), "question": "?", **columns})


def said(state: bytes, text: str) -> Answer:
    return answer(Acts, state, text, tagged_calls)


# --- tools and their schemas ----------------------------------------------------------------------


def test_tools_are_the_public_methods_in_the_order_of_the_class() -> None:
    assert tool_names(Acts) == TOOLS
    assert tool_names(BiggerShop) == ["buy", "sell"]
    assert not NOT_TOOLS & {*tool_names(Shop)}


def test_a_schema_comes_from_type_hints_and_the_docstring() -> None:
    buy, sell = tool_schemas(BiggerShop)
    assert buy == {
        "type": "function",
        "function": {
            "name": "buy",
            "description": "Buy things.",
            "parameters": {
                "type": "object",
                "properties": {
                    "thing": {"type": "string", "description": "What to buy."},
                    "number": {"type": "integer", "description": "How many."},
                },
                "required": ["thing"],
            },
            "return": {"type": "string"},
        },
    }
    things = sell["function"]["parameters"]["properties"]["things"]
    assert things == {
        "type": "array",
        "items": {"type": "string"},
        "description": "What to sell.",
    }


class NoDocstring(Shop):
    def undescribed(self, a: int) -> str:
        return str(a)


class NoHints(Shop):
    def unhinted(self, a):  # type: ignore[no-untyped-def]
        """Do something.

        Args:
            a: A number.
        """
        return a


class NoArguments(Shop):
    def unexplained(self, a: int) -> str:
        """Do something."""
        return str(a)


@pytest.mark.parametrize(
    ("cls", "tool"),
    [(NoDocstring, "undescribed"), (NoHints, "unhinted"), (NoArguments, "unexplained")],
)
def test_a_tool_that_cannot_be_described_is_refused(cls: Any, tool: str) -> None:
    why = rf"task\.environment: the tool {tool} of {cls.__name__} .*type hint.*'Args:'"
    with pytest.raises(ConfigError, match=why):
        tool_schemas(cls)


REFUSED = {
    "nonsense": "is not  or module:function; e.g. my_environment:Calculator",
    "no_such_module:Calculator": "cannot import no_such_module",
    "tool_acts:NoSuch": "tool_acts has no .* NoSuch; it has: .*Acts",
    "tool_acts:call": "raised TypeError: .*; it must return an environment without any arguments",
    "pathlib:Path": r"is not a class with a method reset\(self, \*\*problem\); e\.g\. examples",
    "environments_of_users:Silent": "has no tools: they are its public methods beside reset",
}
SILENT = "class Silent:\n    def reset(self): ...\n    reward = 1.0\n"


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_no_environment_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments_of_users.py").write_text(SILENT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"task\.environment: '{name}'.*{REFUSED[name]}"):
        environment_class(name)


def test_the_class_is_found_by_its_name() -> None:
    assert environment_class("tool_acts:Acts") is Acts


# --- what an environment says ---------------------------------------------------------------------


def test_reset_gets_the_columns_that_it_names_and_may_add_to_the_question(log: Path) -> None:
    assert begun(log).messages == ()
    assert begun(log, greeting="Hello.").messages == ("Hello.",)
    shop = pickle.loads(begin(Shop, {"question": "?", "answer": "4"}).state)
    assert shop.problem == {"question": "?", "answer": "4"}


def test_calls_are_answered_in_order_and_the_state_goes_on(log: Path) -> None:
    first = said(begun(log).state, f"Let me see. {call('count')} and {call('count', what='b')}")
    assert first.messages == ("call 1", "call 2")
    assert (first.done, first.num_errors, first.reward) == (False, 0, 0.0)
    assert said(first.state, call("later")).messages == ("later 3",)
    assert log.read_text().split() == ["count", "b", "later"]


def test_a_state_is_a_value_that_calls_do_not_change(log: Path) -> None:
    """Samples of a group start from one state."""
    state = begun(log).state
    assert [said(state, call("count")).messages for _ in range(3)] == [("call 1",)] * 3


def test_a_turn_without_a_call_ends_the_trajectory(log: Path) -> None:
    ended = said(begun(log).state, "The answer is 4.")
    assert (ended.messages, ended.done, ended.num_errors) == ((), True, 0)
    won = said(begun(log).state, call("win"))
    assert (won.messages, won.done, won.reward) == (("won",), True, 1.0)


MALFORMED = {
    "<tool_call>no JSON</tool_call>": "this is not a tool call; write <tool_call>",
    "<tool_call></tool_call>": "this is not a tool call",
    '<tool_call>{"name": "count"': "this is not a tool call",
    "<tool_call>[1, 2]</tool_call>": "this is not a tool call",
    "<tool_call>5</tool_call>": "this is not a tool call",
    '<tool_call>"count"</tool_call>': "this is not a tool call",
    "<tool_call>{}</tool_call>": "this is not a tool call",
    f"<tool_call>{'[' * 100_000}</tool_call>": "this is not a tool call",
    '<tool_call>{"name": 5}</tool_call>': "a tool call has a name, and arguments by name",
    '<tool_call>{"name": "count", "arguments": [1]}</tool_call>': "arguments by name",
    '<tool_call>{"name": "count", "arguments": "b"}</tool_call>': "arguments by name",
    call("multiply", a=1): "there is no tool 'multiply'; the tools are count, wait, crash",
    call("reset", log="x"): "there is no tool 'reset'",
    call("_note", what="x"): "there is no tool '_note'",
    call("__class__"): "there is no tool '__class__'",
    call("wait"): "wait: missing a required argument: 'seconds'",
    call("count", other=1): "count: got an unexpected keyword argument 'other'",
    call("count", self=1): "count: got an unexpected keyword argument 'self'",
    call("wait", seconds="long"): "TypeError: ",
    call("fail"): "ValueError: no luck xxx",
    call("leave"): "SystemExit: 3",
}


@pytest.mark.parametrize("text", MALFORMED, ids=[text[:60] for text in MALFORMED])
def test_a_call_that_fails_is_an_observation(log: Path, text: str) -> None:
    found = said(begun(log).state, text)
    (message,) = found.messages
    assert message.startswith("error: ")
    assert MALFORMED[text] in message
    assert "\n" not in message
    assert len(message) < MAX_ERROR + 100
    assert (found.done, found.num_errors) == (False, 1)
    assert said(found.state, call("count")).num_errors == 0, "the trajectory goes on"


def test_one_call_of_several_may_fail(log: Path) -> None:
    found = said(begun(log).state, call("count") + call("fail") + call("count"))
    assert [m[:6] for m in found.messages] == ["call 1", "error:", "call 2"]
    assert found.num_errors == 1


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (2, 2.0),
        (True, 1.0),
        (None, None),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
        (lambda: 0.25, 0.25),
    ],
    ids=["whole", "true", "none", "fraction", "decimal", "method"],
)
def test_a_reward_is_a_number_or_none(
    reward: Any, value: float | None, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    stored = staticmethod(reward) if callable(reward) else reward
    monkeypatch.setattr(Acts, "reward", stored)
    assert begun(log).reward == value


def test_calls_are_read_wherever_they_stand() -> None:
    text = f"a{call('x', b=1)}\n<tool_call>\n{json.dumps({'name': 'y'})}\n</tool_call>"
    assert tagged_calls(text) == [("x", {"b": 1}), ("y", {})]
    assert tagged_calls('<tool_call>{"name": "z"}') == [("z", {})], "the end of a turn ends it"
    assert tagged_calls("4 < 5, and no <tool> at all") == []


# --- odd environments -----------------------------------------------------------------------------


class Rewarding(Shop):
    """Its reward is what the problem names."""

    def reset(self, **problem: Any) -> None:
        self.reward = problem["reward"]


class Late(Shop):
    async def reward(self) -> float:  # type: ignore[override]
        return 0.25


class Misspelt(Shop):
    @property
    def reward(self) -> float:  # type: ignore[override]
        return self.scroe  # type: ignore[attr-defined]


def test_rewards_of_numpy_count() -> None:
    numpy = pytest.importorskip("numpy")
    for reward in (numpy.float32(1), numpy.int64(1), numpy.bool_(True), numpy.array(1.0)):
        assert begin(Rewarding, {"reward": reward}).reward == 1.0


@pytest.mark.parametrize("reward", ["1.0", math.nan, math.inf, [1.0], object])
def test_a_reward_that_is_no_number_is_known_as_one(reward: Any) -> None:
    found = begin(Rewarding, {"reward": reward}).reward
    assert found is not None
    assert not math.isfinite(found)


def test_a_reward_may_be_async_and_its_faults_are_seen() -> None:
    assert begin(Late, {}).reward == 0.25
    with pytest.raises(AttributeError, match="scroe"):
        begin(Misspelt, {})


class Odd(Shop):
    def say(self, what: str) -> Any:
        """Say what is known under a name.

        Args:
            what: The name.
        """
        return {
            "rows": [{"name": "id", "type": "INTEGER"}],
            "nothing": [],
            "half": "smile \ud83d",
        }[what]


@pytest.mark.parametrize(
    ("what", "read"),
    [
        ("rows", "[{'name': 'id', 'type': 'INTEGER'}]"),
        ("nothing", "[]"),
        ("half", "smile ?"),
    ],
)
def test_what_a_tool_returns_becomes_a_text_that_tokenizers_take(what: str, read: str) -> None:
    found = answer(Odd, begin(Odd, {}).state, call("say", what=what), tagged_calls)
    assert (found.messages, found.num_errors) == ((read,), 0)


class Lines(Shop):
    def lines(self) -> Any:
        """Say line after line."""
        yield "a"


def test_a_tool_that_is_a_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the tool lines of Lines is a generator; return one"):
        tool_schemas(Lines)
