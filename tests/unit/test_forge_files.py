"""Workflows and Dockerfiles name only what exists, and a release is checked before it is made."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from script_files import ROOT, script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("docker/*.Dockerfile")]
release = script(".ci/release.py")


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda p: p.name)
def test_commands_of_workflows_and_images_name_what_exists(path: Path) -> None:
    text = re.sub(r"#.*", "", path.read_text())
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", text)) - {"ca-certificates"} <= set(targets)
    extras = ",".join(re.findall(r"(?:\.|tlt-rl)\[([a-z,]+)\]", text)).split(",")
    assert set(extras) - {""} <= set(PROJECT["optional-dependencies"])
    assert all((ROOT / name).exists() for name in re.findall(r"\s(\.ci/[\w.]+)", text))
    for line in re.findall(r"^COPY (.*)", text, re.M):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """Return a folder with the files of a release as they must be when it is tagged."""
    for name in ("pyproject.toml", "CITATION.cff", "src/tlt/__init__.py", "docs/gpus.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n## [{version}] - 2026-12-01\n\n### Added\n- Much.\n"
    )
    (tmp_path / "docs" / "install.md").write_text("# Install\n")
    (tmp_path / "SECURITY.md").write_text("# Security\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("CITATION.cff", "version: 0", "version: 1"),
        ("CHANGELOG.md", " - 2026-12-01", ""),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- More.\n"),
        ("CHANGELOG.md", "### Added\n- Much.\n", ""),
        ("CHANGELOG.md", "- Much.", "- In preparation."),
        ("SECURITY.md", "# S", "No release has been made yet. # S"),
    ],
)
def test_a_release_with_a_fault_is_refused(released: Path, file: str, old: str, new: str) -> None:
    tag = f"v{PROJECT['version']}"
    assert release.faults(tag, released) == []
    (released / file).write_text((released / file).read_text().replace(old, new, 1))
    (fault,) = release.faults(tag, released)
    assert file in fault


def test_all_places_name_one_version() -> None:
    assert set(release.versions(ROOT).values()) == {PROJECT["version"]}
