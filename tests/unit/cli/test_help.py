"""The help of every command fits a screen, and the page of commands names them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from called import tlt
from typer.main import get_command

from tlt.cli.main import app

MAX_COMMANDS, MAX_LINES, COLUMNS = 12, 40, 100
PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all below it."""
    yield words
    for name, inside in getattr(command, "commands", {}).items():
        if not inside.hidden:
            yield from commands(inside, (*words, name))


COMMANDS = list(commands(get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_screen(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    code, output, _ = tlt(*words, "--help")
    assert code == 0
    assert re.search(rf"Usage: \S+ {' '.join(words)}", output)
    lines = output.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= COLUMNS


def test_there_are_few_commands_and_the_page_names_all() -> None:
    assert len([words for words in COMMANDS if len(words) == 1]) <= MAX_COMMANDS
    page = PAGE.read_text()
    groups = {words[:-1] for words in COMMANDS if words}
    missing = [words for words in COMMANDS if f"`tlt {' '.join(words)}`" not in page]
    assert [words for words in missing if words not in groups] == []


def test_only_the_word_calibrate_names_a_command_of_simulate() -> None:
    assert "[scenario]" in tlt("simulate", "-h")[1]
    assert "RUNS" in tlt("simulate", "calibrate", "-h")[1].upper()
    code, _, errors = tlt("simulate", "calibrated.toml")
    assert code == 2
    assert "calibrated.toml" in errors


@pytest.mark.parametrize("words", [("demo",), ("eval",), ("verify",), ("simulate",)], ids=" ".join)
def test_a_paragraph_of_help_breaks_only_where_the_terminal_ends(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = tlt(*words, "--help")[1].partition("╭")[0]
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        for line, following in pairwise(lines):
            assert len(line) + len(following.partition(" ")[0]) > 55
