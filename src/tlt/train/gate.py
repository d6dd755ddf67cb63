"""A gate before every RL step, at which a benchmark makes several runs take turns (`debug.gate`).

The run sends the number of the RL step that it wants to take, as a line, and waits for a line back.
It asks once more after its last RL step: the benchmark then knows when that step ended, and decides
when the run may finish. A waiting run sleeps in the kernel. Without a socket the gate is always
open.
"""

from __future__ import annotations

import asyncio

from tlt.errors import ConfigError


class Gate:
    """The run's end of the socket."""

    def __init__(self, socket: str | None) -> None:
        self._socket = socket
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def wait_for_turn(self, step: int) -> None:
        """Return when the run may take this RL step."""
        if self._socket is None:
            return
        try:
            if self._streams is None:
                self._streams = await asyncio.open_unix_connection(self._socket)
            reader, writer = self._streams
            writer.write(f"{step}\n".encode())
            await writer.drain()
            answer = await reader.readline()
        except OSError as error:
            raise self._nobody(error.strerror or repr(error)) from error
        if not answer:
            raise self._nobody(f"closed before RL step {step}")

    def _nobody(self, why: str) -> ConfigError:
        return ConfigError(
            f"debug.gate = {self._socket!r}: no process gives the run its turn ({why}); leave "
            "the key out, as every run does that benchmarks/e2e/run.py has not started"
        )

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
