"""The gate before every RL step, with a benchmark that is a plain socket."""

import asyncio
from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.train.gate import Gate


async def test_a_run_waits_until_it_is_its_turn(tmp_path: Path) -> None:
    asked: list[bytes] = []
    go = asyncio.Event()

    async def bench(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked.append(line)
            await go.wait()
            go.clear()
            writer.write(b"go\n")
        writer.close()

    async with await asyncio.start_unix_server(bench, tmp_path / "gate"):
        gate = Gate(str(tmp_path / "gate"))
        for step in (1, 2):
            turn = asyncio.create_task(gate.wait_for_turn(step))
            await asyncio.sleep(0.05)
            assert not turn.done()
            go.set()
            await turn
        gate.close()
    assert asked == [b"1\n", b"2\n"]


async def test_a_run_ends_when_nobody_lets_it_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"debug\.gate = .*No such file.*leave the key out"):
        await Gate(str(tmp_path / "gate")).wait_for_turn(1)

    async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_unix_server(gone, tmp_path / "gate"):
        gate = Gate(str(tmp_path / "gate"))
        with pytest.raises(ConfigError, match=r"debug\.gate = .*closed before RL step 3"):
            await gate.wait_for_turn(3)
        gate.close()
