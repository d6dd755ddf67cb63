"""The public API: every name is there, documented and light, and no page goes around it."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tlt

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
ROWS = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", PAGE, re.M)]
READ_BY_USERS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]


def imported_names(code: str) -> list[tuple[str, str]]:
    """Return what some code imports of tlt, as pairs of a module and a name."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "tlt"]


@pytest.mark.parametrize("name", tlt.__all__)
def test_every_public_name_resolves(name: str) -> None:
    for library in ("torch", "vllm", "ray"):
        pytest.importorskip(library)
    value = getattr(tlt, name)
    assert value is not None
    assert getattr(value, "__doc__", None)
    assert name in dir(tlt)


def test_a_name_that_is_not_public_is_named() -> None:
    with pytest.raises(AttributeError, match="no public name 'Pol'"):
        _ = tlt.Pol  # type: ignore[attr-defined]


def test_type_checkers_and_programs_see_the_same() -> None:
    """The guarded imports, which type checkers read, are those that `__getattr__` makes."""
    tree = ast.parse((ROOT / "src" / "tlt" / "__init__.py").read_text())
    (guarded,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        (alias.asname, node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    made = {
        (name, home, tlt._NAMES_THERE.get(name, name))
        for home, names in tlt._HOMES.items()
        for name in names
    }
    assert seen == made
    assert {name for name, _, _ in made} == set(tlt.__all__)


def test_every_public_name_is_on_the_page_and_none_else() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(tlt.__all__)


def test_what_the_page_promises_is_there() -> None:
    for library in ("torch", "vllm", "ray"):
        pytest.importorskip(library)
    promised = re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE)
    assert len(promised) > 40
    for owner, member in promised:
        assert hasattr(getattr(tlt, owner), member), f"{owner}.{member}"


@pytest.mark.parametrize("path", READ_BY_USERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_and_examples_import_public_names_only(path: Path) -> None:
    text = path.read_text()
    blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.S)
    for block in blocks:
        for module, name in imported_names(block) if "import " in block else ():
            if module.startswith("tlt.integrations."):  # one page and one module each
                continue
            assert module == "tlt", f"{path.name} imports {module}"
            assert not name or name in tlt.__all__, f"{path.name} imports tlt.{name}"
        used = re.findall(r"\btlt\.(\w+)\(", block)
        assert set(used) <= set(tlt.__all__), f"{path.name} uses {used}"


def test_a_deep_import_would_be_found() -> None:
    code = "import tlt.rollout\nfrom tlt.contracts import Arm\nfrom tlt import OFF\nimport json"
    assert imported_names(code) == [("tlt.rollout", ""), ("tlt.contracts", "Arm"), ("tlt", "OFF")]


def test_light_names_load_no_heavy_library() -> None:
    code = (
        "import sys, tlt\n"
        "tlt.Arm, tlt.EngineConfig, tlt.build_strategy, tlt.Leases, tlt.Harvest\n"
        "print(sorted({'torch', 'vllm', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_reference_shows_every_name_and_all_that_is_promised() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert sorted(reference.names()) == sorted(tlt.__all__)
    page = reference.page()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert sorted(sections) == sorted(tlt.__all__)
    for name, members in reference.promised().items():
        for member in members:
            assert re.search(rf"\b{member}\b", sections[name]), f"{name}.{member}"
    assert "def take_finished(" in sections["Engine"]  # of a base class
    assert "def train(" in sections["TrainerHandle"]  # all of a protocol
