"""An agent's environment: a calculator for word problems, one call for each event of the story."""

import json
from typing import Any


class Calculator:
    """The public methods are the tools; the reward function looks at the policy's last turn."""

    def reset(self, **problem: Any) -> None:
        self.num_calls = 0

    def calculate(self, sum: str) -> str:
        """Work out a sum.

        Args:
            sum: Such as 4 + 1 or 5 - 2.
        """
        self.num_calls += 1
        first, sign, second = sum.split()
        return str(int(first) + int(sign + second))

    @staticmethod
    def worked(question: str, metadata: dict[str, Any], answer: str, **more: Any) -> list[str]:
        """Return the turns of a policy that solves the problem, to train one on."""
        _, *events, _ = question.split(". ")
        total, turns = metadata["first"], []
        for event, change in zip(events, metadata["changes"], strict=True):
            meaning, sign = ("more", "+") if change > 0 else ("less", "-")
            call = {"name": "calculate", "arguments": {"sum": f"{total} {sign} {abs(change)}"}}
            turns.append(f"{event}: {meaning}. <tool_call>{json.dumps(call)}</tool_call>")
            total += change
        return [*turns, f"<answer>{answer}</answer>"]
