"""Environments of real OpenEnv servers, which run in an environment of their own.

`make check-frameworks` installs it. The echo server is the one that `openenv init` writes.
"""

import os
import pickle
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tlt.agents.environment import answer, begin, environment_class, tagged_calls, tool_schemas
from tlt.agents.openenv import Session
from tlt.errors import ConfigError

HERE = Path(__file__).parent
BIN = (Path(os.environ.get("OPENENV_VENV", HERE.parents[1] / ".venv-openenv")) / "bin").absolute()
if not (BIN / "openenv").exists():
    pytest.skip("needs `make setup-openenv`", allow_module_level=True)

START_S = 120.0
Start = Callable[[str, Path], str]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Start servers, and end them."""
    servers: list[subprocess.Popen[bytes]] = []

    def serve(app: str, folder: Path) -> str:
        port = free_port()
        command = [str(BIN / "python"), "-m", "uvicorn", app, "--port", str(port)]
        servers.append(subprocess.Popen(command, cwd=folder))
        url = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and servers[-1].poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                return url
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{app} does not start")

    yield serve
    for each in servers:
        each.terminate()
    for each in servers:
        each.wait(timeout=30)


@pytest.fixture(scope="module")
def calculator(start: Start) -> str:
    return start("openenv_calculator:app", HERE)


@pytest.fixture(scope="module")
def echo(start: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([BIN / "openenv", "init", "echo"], cwd=folder, check=True, timeout=120)
    return start("server.app:app", folder / "echo")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace(
        "'", '"'
    )


def test_the_mcp_tools_of_a_server_are_an_environment(calculator: str) -> None:
    cls = environment_class(calculator)
    (schema,) = tool_schemas(cls)
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["number"]["type"] == "integer"

    begun = begin(cls, {"question": "?", "answer": "1", "seed": 5})
    start = int(begun.messages[0].removeprefix("The total is ").rstrip("."))
    # Two samples of a group start from one state, and each goes its own way in its own session.
    one = answer(cls, begun.state, call("add", number=3), tagged_calls)
    other = answer(cls, begun.state, call("add", number=4), tagged_calls)
    assert (one.messages, other.messages) == ((str(start + 3),), (str(start + 4),))
    two = answer(cls, one.state, call("add", number=10) + call("add", number=100), tagged_calls)
    assert two.messages == (str(start + 13), str(start + 113))
    assert (one.done, two.done, one.reward, two.reward) == (False, True, 0.0, 1.0)


def test_an_error_of_a_tool_is_read_by_the_policy(calculator: str) -> None:
    cls = environment_class(calculator)
    begun = begin(cls, {"seed": 5})
    said = answer(cls, begun.state, call("add", number=-1), tagged_calls)
    assert said.num_errors == 1
    assert "only upwards" in said.messages[0]


def test_a_server_that_answers_otherwise_the_second_time_ends_the_session(calculator: str) -> None:
    """Without a seed, `reset` draws another number."""
    cls = environment_class(calculator)
    begun = begin(cls, {"question": "?"})
    said = answer(cls, begun.state, call("add", number=1), tagged_calls)
    assert said.num_errors == 1
    assert "pass a seed to reset" in said.messages[0]


def test_a_server_with_actions_has_the_tool_step(echo: str) -> None:
    cls = environment_class(echo)
    (schema,) = tool_schemas(cls)
    assert schema["function"]["name"] == "step"
    assert "message" in schema["function"]["parameters"]["properties"]

    begun = begin(cls, {"question": "?"})
    assert "environment ready" in begun.messages[0]
    said = answer(cls, begun.state, call("step", message="hello"), tagged_calls)
    assert '"echoed_message": "hello"' in said.messages[0]
    assert said.reward == pytest.approx(0.5)


def test_a_session_goes_on_after_it_was_pickled(echo: str) -> None:
    session = Session(echo)
    session.reset(seed=1)
    assert session.step({"message": "one"}).observation["echoed_message"] == "one"
    again = pickle.loads(pickle.dumps(session))
    again.step({"message": "two"})
    assert again.state()["step_count"] == 2
    again.close()


def test_no_server_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers.*start it first"):
        environment_class(f"http://127.0.0.1:{free_port()}")
