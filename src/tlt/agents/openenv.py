"""Environments on OpenEnv servers, over their WebSocket, without OpenEnv's own package.

A `Session` is a value like any environment: the questions and answers since its `reset`. The
connection belongs to one call of a tool process. The next call opens a new session and repeats the
actions before it continues. The server must answer them as before, else the call fails: so give
`reset` a seed, and keep what actions do inside their session.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from tlt.errors import ConfigError

CONNECT_S = 10.0
"""Seconds in which a server must have a place for a session."""
ANSWER_S = 600.0
"""Longest answer; `tools.timeout_s` ends a call before."""


class Result(NamedTuple):
    """A server's answer to `reset` and `step`."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """An episode on a server, with the methods of OpenEnv's synchronous client."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._told: list[tuple[dict[str, Any], Result]] = []
        self._connection: Any = None

    def reset(self, **options: Any) -> Result:
        """Begin an episode; the server uses the options that it knows."""
        self._told = []
        return self._tell({"type": "reset", "data": options})

    def step(self, action: dict[str, Any]) -> Result:
        return self._tell({"type": "step", "data": action})

    def state(self) -> dict[str, Any]:
        self._connect()
        return self._ask({"type": "state"})

    def close(self) -> None:
        """End the session on the server; the next call opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # raises at the latest when the server has closed it
                connection.send('{"type": "close"}')
                connection.recv(timeout=CONNECT_S)
            connection.close()

    __del__ = close

    def __getstate__(self) -> dict[str, Any]:
        self.close()
        return self.__dict__

    def _tell(self, message: dict[str, Any]) -> Result:
        self._connect()
        result = _result(self._ask(message))
        self._told.append((message, result))
        return result

    def _connect(self) -> None:
        """Open a session, unless one is open, and bring it to where this one was."""
        if self._connection is not None:
            return
        from websockets.sync.client import connect

        end_s = time.monotonic() + CONNECT_S
        while self._connection is None:
            self._connection = connect(self._url, open_timeout=CONNECT_S, max_size=None)
            try:
                self._ask({"type": "state"})
            except OSError:  # all places are taken
                self.close()
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)
        for message, before in self._told:
            if _result(self._ask(message)) != before:
                self.close()
                raise RuntimeError(
                    "the server does not answer the same actions as before, so its session cannot "
                    "be continued; pass a seed to reset"
                )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with suppress(Exception):  # a full server has sent the reason and closed: read it
            self._connection.send(json.dumps(message, default=str))
        said: dict[str, Any] = json.loads(self._connection.recv(timeout=ANSWER_S))
        data: dict[str, Any] = said.get("data", {})
        if said.get("type") == "error":
            is_full = data.get("code") == "CAPACITY_REACHED"
            raise (OSError if is_full else RuntimeError)(data.get("message"))
        return data


def _result(data: dict[str, Any]) -> Result:
    # Metadata may hold the time, or a random id.
    observation = {k: v for k, v in data.get("observation", {}).items() if k != "metadata"}
    return Result(observation, data.get("reward"), bool(data.get("done")))


class _Served:
    """An environment whose tools a server runs; `reward` sums the rewards of the steps."""

    url: str
    reward: float | None = None
    done = False

    def reset(self, **problem: Any) -> str | None:
        self._session = Session(self.url)
        return self._read(self._session.reset(**problem))

    def _read(self, result: Result) -> str | None:
        observation, reward, self.done = result
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward
        if "tool_name" not in observation:
            return json.dumps(observation) if observation else None
        said = observation["result"]
        if failure := observation.get("error"):
            raise RuntimeError(failure["message"])
        if not isinstance(said, dict) or "content" not in said:
            return str(said)
        text = "\n".join(each["text"] for each in said["content"] if each["type"] == "text")
        if said.get("is_error"):
            raise RuntimeError(text)
        return text

    def __reduce__(self) -> Any:
        return _revived, (self.url, self.__dict__)


def _revived(url: str, state: dict[str, Any]) -> Any:
    environment = served(url)()
    environment.__dict__.update(state)
    return environment


def _tool(name: str, is_mcp: bool) -> Callable[..., str | None]:
    def call(self: Any, **arguments: Any) -> str | None:
        mcp = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return str(self._read(self._session.step(mcp if is_mcp else arguments)))

    return call


@cache
def served(url: str, key: str = "task.environment") -> Any:
    """Return the class of environments on a server: its MCP tools, or else the tool `step`."""
    session, is_mcp = Session(url), True
    try:
        try:
            tools = session.step({"type": "list_tools"}).observation["tools"]
        except (RuntimeError, LookupError):  # an environment with its own actions
            is_mcp = False
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CONNECT_S) as page:
                schema = json.load(page)["action"]
            what = schema.get("description") or "Act in the environment."
            tools = [{"name": "step", "description": what, "input_schema": schema}]
    except Exception as error:  # from the network, or from an answer that is not OpenEnv's
        raise ConfigError(
            f"{key}: no OpenEnv server answers at {url} ({type(error).__name__}: {error}); start "
            "it first, e.g. uvicorn server.app:app --port 8000"
        ) from error
    finally:
        session.close()
    functions = [
        {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
        for t in tools
    ]
    members: dict[str, Any] = {t["name"]: _tool(t["name"], is_mcp) for t in tools}
    members |= {"url": url, "_schemas": [{"type": "function", "function": f} for f in functions]}
    return type("Served", (_Served,), members)
