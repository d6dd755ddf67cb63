"""Classes for TRL's `environment_factory` and its reward functions work as they are.

The protocol is that of TRL 1.16: `__init__` without arguments, `reset(**columns)` that may return a
text, tools with type hints and docstrings, `get_reward`, and rewards that get `environments`.
"""

import asyncio
import importlib.util
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

for library in ("pebble", "transformers"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}", allow_module_level=True)

from tlt.agents.environment import (  # noqa: E402
    answer,
    begin,
    environment_class,
    tagged_calls,
    tool_schemas,
)
from tlt.agents.host import ToolHost  # noqa: E402
from tlt.agents.scoring import state_reward  # noqa: E402
from tlt.config.tasks import ToolsConfig  # noqa: E402
from tlt.config.train import TrainConfig  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402
from tlt.tasks.gym import Problem  # noqa: E402
from tlt.tasks.rewards import RewardPool, exact_score  # noqa: E402

CODE = '''
from functools import partial


class HigherLower:
    """Guess a number, as an environment for GRPOTrainer."""

    def __init__(self, tries: int = 3):
        self.tries = tries
        self.number = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.number = kwargs["number"]
        self.guesses = []
        self.reward = 0.0
        self.done = False
        return "You have {} tries.".format(self.tries)

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Your guess.

        Returns:
            Whether the number is higher or lower.
        """
        if self.done:
            raise ValueError("the game is over")
        self.guesses.append(number)
        self.reward = float(number == self.number)
        self.done = self.reward == 1.0 or len(self.guesses) == self.tries
        if self.reward:
            return "right"
        return "higher" if number < self.number else "lower"

    async def hint(self) -> list[dict]:
        """
        Ask for a hint.

        Returns:
            The hint.
        """
        return [{"type": "text", "text": "even" if self.number % 2 == 0 else "odd"}]

    def show(self) -> list[dict]:
        """
        Show a picture.

        Returns:
            The picture.
        """
        return [{"type": "image", "image": None}]

    def _private(self):
        raise NotImplementedError


class Owner(HigherLower):
    """Its reward is its own, and there is none before a guess."""

    async def get_reward(self) -> float:
        return 1.0 / len(self.guesses)


def two_tries():
    return HigherLower(tries=2)


bound = partial(HigherLower, 1)


def reward_func(environments, **kwargs):
    assert kwargs["completions"] == [[{"role": "assistant", "content": "I am done"}]]
    assert kwargs["prompts"][0][-1]["content"] == "Guess!" and kwargs["number"] == [7]
    return [float(len(environment.guesses)) for environment in environments]


async def only_environments(environments) -> list[float]:
    return [environment.reward for environment in environments]


def of_texts(problem, text):
    return 1.0


def broken():
    raise OSError("no licence")
'''

PROBLEM = Problem("p", "Guess!", "7", entry={"number": 7})


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"trl_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def config(module: str, environment: str, reward: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run": {"out": "runs/x", "num_steps": 1},
            "policy": {"model": "models/x"},
            "task": {"path": "problems.jsonl", "environment": f"{module}:{environment}"},
            "reward": {"function": reward},
            "sampling": {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8},
        }
    )


def test_a_class_of_trl_is_an_environment(module: str) -> None:
    cls = environment_class(f"{module}:HigherLower")
    names = [schema["function"]["name"] for schema in tool_schemas(cls)]
    assert names == ["guess", "hint", "show"]
    begun = begin(cls, {"question": "Guess!", "number": 7})
    assert begun.messages == ("You have 3 tries.",)
    one = answer(cls, begun.state, call("hint") + call("guess", number=3), tagged_calls)
    assert one.messages == ("odd", "higher")
    assert not one.done
    two = answer(cls, one.state, call("guess", number=7), tagged_calls)
    assert (two.messages, two.done, two.reward) == (("right",), True, 1.0)
    picture = answer(cls, begun.state, call("show"), tagged_calls)
    assert picture.num_errors == 1
    assert "images are not supported" in picture.messages[0]


@pytest.mark.parametrize(("name", "tries"), [("two_tries", 2), ("bound", 1)])
def test_a_factory_is_an_environment(module: str, name: str, tries: int, tmp_path: Path) -> None:
    """Also in tool processes, which import it by its name."""

    async def said() -> tuple[str, ...]:
        with closing(ToolHost(ToolsConfig(num_workers=1), "no-model", tmp_path / "tools")) as host:
            begun = await host.begin(f"{module}:{name}", "1", 0, PROBLEM)
            said = await host.answer(
                *(f"{module}:{name}", "1", "1/0/0", 1, begun.state, call("guess", number=9))
            )
            assert said.done == (tries == 1)
            return begun.messages + said.messages

    assert asyncio.run(said()) == (f"You have {tries} tries.", "lower")


def test_a_factory_that_fails_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="raised OSError: no licence; it must return"):
        environment_class(f"{module}:broken")


def test_rewards_look_at_the_environment(module: str) -> None:
    """`get_reward` and functions with `environments` are called once, with the last state."""
    cls = environment_class(f"{module}:Owner")
    state = begin(cls, {"question": "Guess!", "number": 7}).state
    for number in (1, 7):
        said = answer(cls, state, call("guess", number=number), tagged_calls)
        state = said.state

    async def values() -> list[float]:
        with closing(RewardPool(exact_score, num_workers=1, timeout_s=30)) as pool:
            found = []
            for reward in ("auto", f"{module}:reward_func", f"{module}:only_environments"):
                looks = state_reward(config(module, "Owner", reward))
                assert looks is not None
                scored = await pool.score(PROBLEM, "I am done", looks(state))
                assert scored.fault is None, scored.detail
                found.append(scored.value)
            return found

    assert asyncio.run(values()) == [0.5, 2.0, 1.0]


@pytest.mark.parametrize(
    ("environment", "reward"),
    [("HigherLower", "auto"), ("two_tries", "auto"), ("Owner", "exact"), ("Owner", "{}:of_texts")],
)
def test_other_rewards_do_not(module: str, environment: str, reward: str) -> None:
    assert state_reward(config(module, environment, reward.format(module))) is None
