"""An OpenEnv server with MCP tools: a sum to reach from a number that the seed decides."""

import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Calculator(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("calculator")
        self.total = 0
        self.num_calls = 0

        @mcp.tool  # type: ignore[untyped-decorator]
        def add(number: int) -> int:
            """Add a number to the total."""
            if number < 0:
                raise ValueError("only upwards")
            self.num_calls += 1
            self.total += number
            return self.total

        super().__init__(mcp)

    def reset(self, seed: int | None = None, **options: Any) -> Observation:
        self.total = random.Random(seed).randrange(10**6)
        return CallToolObservation(tool_name="reset", result=f"The total is {self.total}.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._scored(super().step(action, timeout_s, **options))

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **options: Any
    ) -> Observation:
        return self._scored(await super().step_async(action, timeout_s, **options))

    def _scored(self, said: Observation) -> Observation:
        said.reward = 1.0 if self.num_calls == 2 else 0.0
        said.done = self.num_calls == 3
        return said

    @property
    def state(self) -> State:
        return State(step_count=self.num_calls)


app = create_app(
    Calculator, CallToolAction, CallToolObservation, env_name="calculator", max_concurrent_envs=1
)
