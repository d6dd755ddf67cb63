"""A reward that obeys the response. Workers import this module, so it stays light."""

import os
import signal
import sys
import time
from pathlib import Path

from tlt.tasks.gym import Problem


class Awkward(Exception):
    """Exception that cannot be unpickled: it needs two arguments and pickles one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def act(problem: Problem, response: str) -> float:
    """Do what the response says, and return the reward in it."""
    what, _, argument = response.partition(" ")
    if what == "hang":
        time.sleep(60)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "crash-once" and not Path(argument).exists():
        Path(argument).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise Awkward("no", "never")
    if what == "exit":
        sys.exit(3)
    if what == "string":
        return "good"  # type: ignore[return-value]
    if what == "lambda":
        return lambda: 1.0  # type: ignore[return-value]
    if what == "heavy":
        return float(bool({"torch", "ray", "vllm", "transformers"} & set(sys.modules)))
    return float(argument or response) if what != "crash-once" else 1.0
