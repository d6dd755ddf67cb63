"""An environment whose tools do what they are told. Tool processes import this module."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Acts:
    """Every call is noted in the file that the problem names."""

    reward: Any = 0.0
    done = False

    def reset(self, log: str, greeting: str = "", dies: str = "") -> str | None:
        """`dies` names a file; the process dies unless it is there, and dies once if it can be."""
        if dies and not Path(dies).exists():
            with contextlib.suppress(OSError):
                Path(dies).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.log, self.num_calls = Path(log), 0
        return greeting or None

    def _note(self, what: str) -> int:
        self.num_calls += 1
        with self.log.open("a") as file:
            file.write(f"{what}\n")
        return self.num_calls

    def count(self, what: str = "count") -> str:
        """Count the calls.

        Args:
            what: What to note.
        """
        return f"call {self._note(what)}"

    def wait(self, seconds: float) -> str:
        """Take so long.

        Args:
            seconds: Seconds to wait.
        """
        self._note("wait")
        time.sleep(seconds)
        return "waited"

    def crash(self) -> str:
        """End the process."""
        self._note("crash")
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    def fail(self) -> str:
        """Raise an error."""
        raise ValueError(f"no\n  luck {'x' * 1000}")

    def leave(self) -> str:
        """End the program."""
        sys.exit(3)

    async def later(self) -> str:
        """Answer from a coroutine."""
        return f"later {self._note('later')}"

    def win(self) -> str:
        """End the trajectory with the reward 1."""
        self.reward, self.done = 1.0, True
        return "won"

    def keep_open(self) -> str:
        """Keep what no pickle takes."""
        self.file = self.log.open("a")
        return "open"


class Careless(Acts):
    """Tools that change their process."""

    def enter(self, folder: str) -> str:
        """Change the folder.

        Args:
            folder: Its name.
        """
        os.chdir(folder)
        return f"in {self._note('enter')}"

    def exhaust(self) -> str:
        """Open files until there are no more."""
        self._note("exhaust")
        with contextlib.suppress(OSError):
            while True:
                _open_files.append(os.open(os.devnull, os.O_RDONLY))
        return "no more"

    def start(self) -> str:
        """Wait for a program that never ends."""
        with self.log.open("a") as file:
            subprocess.run(["sh", "-c", "echo $$; sleep 300"], stdout=file, check=False)
        return "never"


_open_files: list[int] = []


def call(name: str, **arguments: Any) -> str:
    """Return a turn's text that calls a tool."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{written}</tool_call>"
