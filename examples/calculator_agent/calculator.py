"""An agent's environment: a calculator for word problems, one call for each event of the story."""

import json
from typing import Any


class Calculator:
    """The public methods are the tools; the reward function looks at the policy's last turn."""

    def reset(self, **problem: Any) -> None:
        self.num_calls = 0

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.num_calls += 1
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """Subtract the second number from the first.

        Args:
            a: The first number.
            b: The second number.
        """
        self.num_calls += 1
        return str(a - b)

    @staticmethod
    def worked(metadata: dict[str, Any], answer: str, **_: Any) -> list[str]:
        """Return the turns of a policy that solves the problem, to train one on."""
        total, turns = metadata["first"], []
        for change in metadata["changes"]:
            tool = "add" if change > 0 else "subtract"
            call = {"name": tool, "arguments": {"a": total, "b": abs(change)}}
            turns.append(f"<tool_call>{json.dumps(call)}</tool_call>")
            total += change
        return [*turns, f"<answer>{answer}</answer>"]
