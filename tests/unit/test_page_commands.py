"""Every command of every page parses, and names files, targets and settings that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from script_files import ROOT, script
from typer.main import get_command

from tlt.cli.main import app
from tlt.config.load import apply_overrides, check, load_config
from tlt.config.train import TrainConfig

ANY_RUN = ROOT / "configs" / "tiny_gcd_cpu.toml"
"""Stands for a TOML file of the reader."""
SCRIPT = script(".ci/page_commands.py")
COMMANDS: Any = get_command(app)


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse the arguments of `tlt` without running them; raise what the command would raise."""
    command: Any = get_command(app)
    name = ""
    while words and words[0] in getattr(command, "commands", {}):
        name = f"{name} {words[0]}".strip()
        command = command.commands[words[0]]
        words = words[1:]
    if words in (["--version"], ["--install-completion"]):
        return words[0], {}
    context = command.make_context(name, words)
    assert not hasattr(context.command, "commands"), f"tlt {name} has no command {words}"
    return name, context.params


def check_settings(name: str, arguments: dict[str, Any]) -> None:
    """Refuse settings that the schema does not have."""
    overrides = list(arguments.get("overrides") or [])
    if name == "train":
        path = ROOT / arguments["config"]
        load_config(TrainConfig, path if path.exists() else ANY_RUN, overrides)
    if name == "simulate":
        from tlt.simulate.scenario import ScenarioConfig

        first = arguments["scenario"]
        changes = [str(first), *overrides] if first and "=" in first.name else overrides
        values = [text.split(",")[0] for text in arguments["sweep"] or ()]
        if not (first and first.suffix == ".toml"):  # may be the settings of a run
            check(ScenarioConfig, apply_overrides({}, [*changes, *values]), "scenario")


def try_command(line: str) -> None:
    """Raise for a command that cannot work as it is written."""
    words = shlex.split(re.sub(r" > \S+$", "", line))
    if words[0] == "env":
        words = words[1:]
    while "=" in words[0]:
        words = words[1:]
    for word in words:
        if re.match("(configs|examples|benchmarks|docker|tests)/", word):
            assert (ROOT / word).exists(), f"{word} does not exist"
    if words[0] == "tlt":
        check_settings(*parse(words[1:]))
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif words[0].startswith("python") and words[1].endswith(".py"):
        path = ROOT / words[1]
        source = path.read_text() if path.exists() else ""
        for word in words[2:]:
            assert not source or not word.startswith("--") or f'"{word}"' in source, line
    else:
        known = "bash cd docker export hf kubectl pip python python3 ray sbatch source vllm"
        known += " .venv/bin/pre-commit"
        assert words[0] in known.split(), f"{words[0]!r} is no command"


@pytest.mark.parametrize("page", SCRIPT.pages())
def test_the_commands_of_a_page_parse(page: str) -> None:
    for command in SCRIPT.commands(page):
        try_command(command.written)
        if command.run:
            try_command(command.run)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_the_commands_at_the_head_of_a_recipe_parse(path: Path) -> None:
    text = re.sub(r"\\\n#\s*", "", path.read_text())
    for line in re.findall(r"^#   (tlt [^#\n]*)", text, re.M):
        try_command(line.strip())


@pytest.mark.parametrize(
    "line",
    [
        "tlt trian run.toml",
        "tlt train run.toml --chek",
        "tlt train run.toml learner.rl=1e-6",
        "tlt simulate cluster.engines=4",
        "python examples/trl_grpo.py models/tiny --witout",
        "make chek",
    ],
)
def test_a_command_that_cannot_work_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        try_command(line)


def test_the_list_of_commands_that_need_a_gpu_is_current() -> None:
    found = SCRIPT.LISTED.search(SCRIPT.LIST_PAGE.read_text())
    assert found is not None
    assert found[0] == SCRIPT.table(), "run `.ci/page_commands.py --write`"
