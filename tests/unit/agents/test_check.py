"""Runs whose environment cannot work are refused before any engine starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

pytest.importorskip("pebble")
pytest.importorskip("transformers")

from tlt.agents.check import described_tools, try_environment
from tlt.errors import ConfigError
from tlt.models import tiny
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem

ACTS = {"name": "gcd", "environment": "tool_acts:Acts"}


def test_a_run_without_an_environment_has_no_tools() -> None:
    assert described_tools(small_run()) == []


def test_the_tools_of_a_runs_environment_are_described() -> None:
    names = [tool["function"]["name"] for tool in described_tools(small_run(task=ACTS))]
    assert names[:2] == ["count", "wait"]


def test_what_an_environment_excludes_is_refused() -> None:
    sets = [{"name": "other", "task": ACTS}]
    for task in ({"name": "gcd"}, ACTS):
        with pytest.raises(ConfigError, match=r"eval\.sets, other: .*eval\.num_problems"):
            described_tools(small_run(task=task, eval={"sets": sets}))
    forced = {"forced_lengths": {"median": 5, "p95": 20, "longest": 40}}
    with pytest.raises(ConfigError, match=r"debug\.forced_lengths .*leave one of them out"):
        described_tools(small_run(task=ACTS, debug=forced))
    with pytest.raises(ConfigError, match=r"task\.environment: 'tool_acts:NoSuch'"):
        described_tools(small_run(task=ACTS | {"environment": "tool_acts:NoSuch"}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=3)


def check(model: Path, **columns: Any) -> None:
    config = small_run(task=ACTS, policy={"model": str(model)}, tools={"timeout_s": 5})
    problem = Problem("p", "?", "4", entry=columns)
    asyncio.run(try_environment(config, Chat(str(model)), problem))


def test_the_first_problem_is_tried(model: Path, tmp_path: Path) -> None:
    check(model, log=str(tmp_path / "calls.txt"))
    assert not (tmp_path / "calls.txt").exists(), "no tool is called"
    with pytest.raises(ConfigError, match=r"does not take the first problem \(error\): TypeError"):
        check(model)
