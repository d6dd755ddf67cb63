"""Checks of an environment before a run starts."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from tlt.agents.environment import environment_class, tool_schemas
from tlt.agents.host import ToolHost
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.processes import Fault


def described_tools(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the schemas of the tools of a run's environment; none in a run without one."""
    for each in config.eval.sets:
        if each.task.environment is not None:
            raise ConfigError(
                f"eval.sets, {each.name}: task.environment belongs to the run's own task; leave it "
                "out, and hold problems out with eval.num_problems"
            )
    if config.task.environment is None:
        return []
    if config.debug.forced_lengths is not None:
        raise ConfigError(
            "debug.forced_lengths forces one length per response, and with task.environment a "
            "response has several turns; leave one of them out"
        )
    return tool_schemas(environment_class(config.task.environment))


async def try_environment(config: TrainConfig, chat: Chat, problem: Problem) -> bytes:
    """Reset the environment for a problem and ask it something, as the run will.

    Return its state at the end.
    """
    name = config.task.environment
    assert name is not None
    chat.after_turn(["4"], chat.tokenizer.eos_token_id, config.tools.max_answer_tokens)
    one = config.tools.model_copy(update={"num_workers": 1})
    with tempfile.TemporaryDirectory() as folder:
        host = ToolHost(one, config.policy.model, Path(folder), name)
        try:
            begun = await host.begin(name, "check", 0, problem)
            said = await host.answer(name, "check", "check", 1, begun.state, "no call")
        except Fault as fault:
            raise ConfigError(
                f"task.environment = {name!r} does not take the first problem ({fault.kind}): "
                f"{fault}; reset gets its columns, and pickle must take the object after it: "
                "keep connections and open files out"
            ) from fault
        finally:
            host.close()
    if said.reward is not None and not math.isfinite(said.reward):
        raise ConfigError(
            f"task.environment = {name!r} has a reward that is not a number; e.g. reward = 0.0"
        )
    if said.num_errors:
        raise ConfigError(
            f"task.environment = {name!r} fails on a turn without a call: {said.messages[0]}; or "
            f"tools.parser = {config.tools.parser!r} does not read this model's texts"
        )
    return said.state
