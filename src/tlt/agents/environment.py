"""What an environment is: a user's class whose public methods are the policy's tools.

    class Calculator:
        reward = 0.0

        def reset(self, **problem): ...

        def multiply(self, a: float, b: float) -> str:
            \"\"\"Multiply two numbers.

            Args:
                a: The first number.
                b: The second number.
            \"\"\"

`reset` gets the columns of the problem, and may return a text that follows the question. A tool
returns what the policy reads next; an exception becomes a text as well. `reward` is the reward when
the trajectory ends, and a true `done` ends it. A class for TRL's `environment_factory` is such a
class; what scores it is in `scoring`.

Between two calls an environment is a value: it is pickled, and the next call may run in another
process. So a tool that hangs or dies costs no other trajectory anything, the samples of a group
start from one state, and a run that was killed continues from the journal.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tlt.errors import ConfigError
from tlt.user_code import chosen_function

NOT_TOOLS = {"reset", "reward", "get_reward", "worked"}
"""Public names of an environment that are not tools."""
BLOCKS = ("text", "image", "image_url")
"""Types of the content blocks of chat messages."""
MAX_ERROR = 300
"""Characters of an error's text that the policy reads."""

Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""
Reader = Callable[[str], list[Call]]
"""Returns the calls in the text of a turn, or raises `ValueError` if they cannot be read."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer to a turn."""

    messages: tuple[str, ...]
    """A message for each call; after `reset` the text that follows the question, if any."""
    state: bytes
    """The environment after the calls."""
    done: bool
    """Whether the trajectory has ended: the turn called no tool, or the environment is done."""
    reward: float | None
    """The environment's reward; None if it has none, and NaN for one that is not a number."""
    num_errors: int = 0
    seconds: float = 0.0


def environment_class(name: str, key: str = "task.environment") -> Any:
    """Return what makes environments: a class, or a function without arguments.

    `name` is `module:Class`, `module:function` or the address of an OpenEnv server.
    """
    if name.startswith(("http://", "https://")):
        from tlt.agents.openenv import served

        return served(name, key)
    found: Any = chosen_function(key, name, {}, "my_environment:Calculator")
    try:
        made = class_of(found)
    except Exception as error:  # a user's function
        raise ConfigError(
            f"{key}: {name!r} raised {type(error).__name__}: {_short(error)}; it must return an "
            "environment without any arguments, or be its class"
        ) from error
    if not callable(getattr(made, "reset", None)):
        raise ConfigError(
            f"{key}: {name!r} is not a class with a method reset(self, **problem); e.g. "
            "examples/calculator_agent/calculator.py"
        )
    if not tool_names(found):
        raise ConfigError(
            f"{key}: {name!r} has no tools: they are its public methods beside reset; e.g. "
            "examples/calculator_agent/calculator.py"
        )
    return found


@cache
def class_of(maker: Any) -> Any:
    """Return the class of the environments that a class or function makes."""
    return maker if inspect.isclass(maker) else type(maker())


def tool_names(cls: Any) -> list[str]:
    """Return the names of an environment's tools, in the order of the class."""
    cls = class_of(cls)
    names = [name for each in reversed(cls.__mro__) for name in vars(each)]
    public = [name for name in dict.fromkeys(names) if not name.startswith("_")]
    return [n for n in public if n not in NOT_TOOLS and inspect.isroutine(getattr(cls, n))]


def tool_schemas(cls: Any, key: str = "task.environment") -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's tools, from docstrings and type hints."""
    if own := getattr(class_of(cls), "_schemas", None):  # a server's
        return list(own)
    from transformers.utils import get_json_schema

    schemas = []
    for name in tool_names(cls):
        if not _answers(getattr(class_of(cls), name)):
            raise ConfigError(
                f"{key}: the tool {name} of {class_of(cls).__name__} is a generator; return one "
                'text, e.g. "\\n".join(lines)'
            )
        try:
            schemas.append(get_json_schema(getattr(cls(), name)))
        except Exception as error:  # the library raises anything on a bad docstring
            raise ConfigError(
                f"{key}: the tool {name} of {class_of(cls).__name__} cannot be described: {error}; "
                "give every argument a type hint and a line under 'Args:' in the docstring"
            ) from error
    return schemas


def _answers(tool: Any) -> bool:
    """Return whether a call has a result; of a generator it has none."""
    return not (inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool))


# --- calls, in a tool process ---------------------------------------------------------------------


def begin(cls: Any, problem: Mapping[str, Any]) -> Answer:
    """Return a new environment's answer to a problem; what `reset` raises is the caller's."""
    environment = cls()
    first = returned(environment.reset(**named(environment.reset, problem)))
    return _answer(environment, () if first is None else (_text(first),), done=False)


def named(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function takes."""
    taken = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return {k: v for k, v in columns.items() if takes_all or k in taken}


def answer(cls: Any, state: bytes, text: str, read: Reader) -> Answer:
    """Return the environment's answer to a turn's text. Errors of tools are caught."""
    try:
        calls = read(text)
    except ValueError as error:
        environment = pickle.loads(state)
        return _answer(environment, (f"error: {_short(error)}",), done=False, num_errors=1)
    environment = pickle.loads(state)
    if not calls:
        return _answer(environment, (), done=True)
    said = [_said(cls, environment, name, arguments) for name, arguments in calls]
    num_errors = sum(failed for _, failed in said)
    done = getattr(environment, "done", False)
    is_done = bool(done) and not callable(done)  # a method is a tool
    return _answer(environment, tuple(text for text, _ in said), is_done, num_errors)


def _said(cls: Any, environment: Any, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a tool's answer, and whether it is an error."""
    names = tool_names(cls)
    if name not in names:
        return f"error: there is no tool {name!r}; the tools are {', '.join(names)}", True
    tool = getattr(environment, name)
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return f"error: {name}: {_short(error)}", True
    try:
        return _text(returned(tool(**arguments))), False
    except BaseException as error:  # also SystemExit, which would end the process
        return f"error: {type(error).__name__}: {_short(error)}", True


def returned(value: Any) -> Any:
    """Return a function's result, also of one that is `async`."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _text(value: Any) -> str:
    """Return what the policy reads: a text, or the texts of content blocks as of chat messages."""
    if not isinstance(value, list) or not value or not all(map(_is_block, value)):
        return str(value)
    if any(block["type"] != "text" for block in value):
        raise ValueError("an environment answers with text; images are not supported")
    return "".join(str(block["text"]) for block in value)


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in BLOCKS


def _answer(environment: Any, messages: tuple[str, ...], done: bool, num_errors: int = 0) -> Answer:
    said, reward = tuple(map(readable, messages)), _reward(environment)
    return Answer(said, pickle.dumps(environment), done, reward, num_errors)


def _reward(environment: Any) -> float | None:
    if inspect.getattr_static(environment, "reward", None) is None:
        return None
    reward = environment.reward
    reward = returned(reward() if callable(reward) else reward)
    if reward is None:
        return None
    try:
        return math.nan if isinstance(reward, str) else float(reward)  # NumPy's and torch's too
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def readable(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_ERROR]


# --- calls in a text ------------------------------------------------------------------------------


def tagged_calls(text: str) -> list[Call]:
    """Return the calls in a text of the Hermes kind: JSON between <tool_call> tags."""
    calls = []
    for written in _CALL.findall(text):
        try:
            said = json.loads(written)
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise ValueError(
                "this is not a tool call; write "
                '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
            ) from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("a tool call has a name, and arguments by name")
        calls.append((name, arguments))
    return calls
