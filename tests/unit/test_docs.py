"""Docs are current: the settings page matches the schema, links work, commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tlt.config.reference import SECTIONS, reference
from tlt.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_settings_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


def test_every_section_is_on_the_settings_page() -> None:
    assert set(TrainConfig.model_fields) <= {name for name, _ in SECTIONS}


@pytest.mark.parametrize("schema", [schema for _, schema in SECTIONS])
def test_every_setting_is_documented(schema: type[BaseModel]) -> None:
    assert all(field.description for field in schema.model_fields.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    """Every `tlt ...` line of a code block parses down to its last option."""
    from typer.main import get_command

    from tlt.cli.main import app

    blocks = "\n".join(re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.S))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    commands = [line.split("#")[0].split()[1:] for line in lines if line.startswith("tlt ")]
    for words in commands:
        command: Any = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {w for w in words if w.startswith("--")} <= options | {"--help"}, words
