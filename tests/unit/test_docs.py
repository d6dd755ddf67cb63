"""Docs are current: the settings page matches the schema; links and flows exist."""

import re
from pathlib import Path

import pytest

from tlt.config.reference import SECTIONS
from tlt.config.train import TrainConfig
from tlt.strategy.reference import page as settings

ROOT = Path(__file__).parents[2]
BESIDE = ("examples/README.md", "benchmarks/README.md")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", *BESIDE)),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_settings_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == settings()
    assert "`str or None`" in page
    assert "\\|" not in page  # the site shows the backslash


def test_the_scenario_page_is_current() -> None:
    pytest.importorskip("numpy")
    from tlt.simulate import reference as scenario

    assert (ROOT / "docs" / "scenario.md").read_text() == scenario.reference()


def test_every_setting_is_documented() -> None:
    assert set(TrainConfig.model_fields) <= {name for name, _ in SECTIONS}
    for name, schema in SECTIONS:
        assert all(field.description for field in schema.model_fields.values()), name


def exists(dotted: str) -> bool:
    """Say whether the source defines a function or method, without importing it."""
    module, names = ROOT / "src", dotted.split(".")
    while names and (module / names[0]).is_dir():
        module /= names.pop(0)
    path = module / f"{names[0]}.py"
    text = path.read_text() if path.exists() else ""
    *classes, function = names[1:]
    return all(f"class {name}" in text for name in classes) and f"def {function}(" in text


@pytest.mark.parametrize("flow", ["sample", "hidden state"])
def test_the_functions_of_a_flow_exist(flow: str) -> None:
    page = (ROOT / "docs" / "how.md").read_text()
    steps = page.partition(f"<!-- flow: {flow} -->\n")[2].partition("<!-- /flow -->")[0]
    named = re.findall(r"^\d+\. `(tlt\.[\w.]+)`", steps, re.M)
    assert len(named) > 10
    assert [name for name in named if not exists(name)] == []


def test_tests_that_pages_name_exist() -> None:
    """The table of faults is only as true as its tests."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`(test_\w+)`", text))
        assert named <= there, (page.name, named - there)
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).exists(), (page.name, path)
