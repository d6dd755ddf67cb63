"""Every command of every page parses, and names files, targets and settings that exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tlt.cli.main import app
from tlt.config.load import apply_overrides, check, load_config
from tlt.config.rollout import SwitchConfig
from tlt.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("configs", "examples", "benchmarks", "docker", "tests")
"""Folders whose files are there before a reader types anything."""
ANY_RUN = ROOT / "configs" / "tiny_gcd_cpu.toml"
"""Stands for a TOML file of the reader."""


def _script() -> ModuleType:
    path = ROOT / ".ci" / "page_commands.py"
    spec = importlib.util.spec_from_file_location("page_commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["page_commands"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@cache
def commands() -> Any:
    """Return the commands of `tlt`."""
    from typer.main import get_command

    return get_command(app)


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse the arguments of `tlt` without running them; raise what the command would raise."""
    command, name = commands(), ""
    while words and words[0] in getattr(command, "commands", {}):
        name = f"{name} {words[0]}".strip()
        command = command.commands[words[0]]
        words = words[1:]
    if words in (["--version"], ["--install-completion"]):
        return words[0], {}
    assert not hasattr(command, "commands"), f"tlt {name} has no command {words}"
    return name, command.make_context(name, words).params


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
    if words[0] in ("export", "cd", "source"):
        settings = [word for word in words if word.startswith("TLT_CONFIG=")]
    else:
        settings = []
        while "=" in words[0]:
            settings.append(words.pop(0))
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "TLT_CONFIG" and not value.endswith(".toml"):
            check(SwitchConfig, apply_overrides({}, value.split()), key)
    for word in words:
        if re.match(rf"({'|'.join(FOLDERS)})/", word):
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
        known = [
            "bash",
            "cd",
            "docker",
            "export",
            "hf",
            "kubectl",
            "pip",
            "python",
            "python3",
            "ray",
            "sbatch",
            "source",
            "vllm",
        ]
        known.append(".venv/bin/pre-commit")
        assert words[0] in known, f"{words[0]!r} is no command"


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


@pytest.mark.parametrize("page", SCRIPT.pages())
def test_commands_in_sentences_exist(page: str) -> None:
    """A command in a sentence may leave things out, but its words and options exist."""
    for line in re.findall(r"`tlt ([a-z][^`]*)`", (ROOT / page).read_text()):
        words = line.split()
        command = commands()
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options | {"--help"}, line


@pytest.mark.parametrize(
    "line",
    [
        "tlt trian run.toml",
        "tlt train run.toml --chek",
        "tlt train run.toml learner.rl=1e-6",
        "tlt train configs/gone.toml",
        "tlt sft --model models/tiny",
        "tlt simulate cluster.engines=4",
        "tlt simulate --sweep cluster.engines=4,8",
        "python examples/gone.py",
        "python examples/trl_grpo.py models/tiny --witout",
        'TLT_CONFIG="strategi.kind=adaptive" python my_program.py',
        "make chek",
        "'+key=value'",
    ],
)
def test_a_command_that_cannot_work_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        try_command(line)


def test_every_rule_is_used() -> None:
    """A rule that fits no command is left over from an earlier page."""
    found = [(c.page, c.block, c.written) for p in SCRIPT.pages() for c in SCRIPT.commands(p)]
    for rule in SCRIPT.RULES["rule"]:
        assert any(
            rule.get("page", page) == page
            and rule.get("block", block) == block
            and re.match(rule["command"], line)
            for page, block, line in found
        ), rule
        assert rule.get("not_run", "gpu") in SCRIPT.REASONS
    assert set(SCRIPT.RULES["prepare"]) <= set(SCRIPT.pages())


def test_the_list_of_commands_that_need_a_gpu_is_current() -> None:
    found = SCRIPT.LISTED.search(SCRIPT.LIST_PAGE.read_text())
    assert found is not None
    assert found[0] == SCRIPT.table(), "run `.ci/page_commands.py --write`"


def test_the_notebook_is_short_and_its_commands_parse() -> None:
    """It holds no outputs: those of another machine would mislead, and change at every run."""
    cells = json.loads((ROOT / "examples" / "one_run.ipynb").read_text())["cells"]
    assert len(cells) <= 15
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    calls = [
        node
        for cell in code
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tlt"
    ]
    assert len(calls) >= 6
    for call in calls:
        try_command(f"tlt {ast.literal_eval(call.args[0])}")


def test_the_settings_of_the_notebook_are_valid() -> None:
    text = (ROOT / "examples" / "one_run.ipynb").read_text()
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    (toml,) = [found for cell in cells for found in re.findall(r'"""\n(\[run\].*?)"""', cell, re.S)]
    check(TrainConfig, tomllib.loads(toml), "the notebook")
