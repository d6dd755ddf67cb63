"""Check that a tag may become a release, and print its notes.

    python .ci/release.py v0.2.0 > notes.md

A release has one version in all places, and a dated section in CHANGELOG.md with nothing left under
Unreleased. The section becomes the notes. With `REPOSITORY_URL` their links are absolute. Needs
nothing but Python.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file names."""
    found = {
        "src/tlt/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r'^version: "?([^"\n]+)"?$',
        "docs/gpus.md": r"`tlt (\d\S*)`",
    }
    named = {"pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]}
    version = {name: str(project["version"]) for name, project in named.items()}
    for name, pattern in found.items():
        match = re.search(pattern, (root / name).read_text(), re.M)
        version[name] = match[1] if match else "no version"
    return version


def section(page: str, heading: str) -> str:
    """Return the text below a heading that starts with these words, or nothing."""
    found = re.search(rf"^## {re.escape(heading)}[^\n]*\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1].strip() if found else ""


def faults(tag: str, root: Path) -> list[str]:
    """Return what keeps a tag from becoming a release."""
    wanted = tag.removeprefix("v")
    said = [
        f"{name} says {version}, the tag {tag}; write {wanted}"
        for name, version in versions(root).items()
        if f"v{version}" != tag
    ]
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        said.append(f"CHANGELOG.md has no section such as: ## [{wanted}] - 2026-12-01")
    if section(changelog, "[Unreleased]"):
        said.append(f"CHANGELOG.md has entries under Unreleased; move them to [{wanted}]")
    notes = section(changelog, f"[{wanted}]")
    if not notes:
        said.append(f"CHANGELOG.md says nothing below [{wanted}]; write what is in the release")
    said += [
        f"{name} says {words!r}: say what is true of a release"
        for name, text, words in (
            ("CHANGELOG.md", notes, "in preparation"),
            ("SECURITY.md", (root / "SECURITY.md").read_text(), "no release has been made yet"),
            ("docs/install.md", (root / "docs" / "install.md").read_text(), "index yet"),
        )
        if words in text.lower()
    ]
    return said


def linked(notes: str, tag: str, repository: str) -> str:
    """Return the notes with links that also lead somewhere outside the repository."""
    if not repository:
        return notes
    return re.sub(r"\]\((?!\w+:)([^)]+)\)", rf"]({repository}/blob/{tag}/\1)", notes)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("name the tag, e.g. python .ci/release.py v0.2.0")
    if found := faults(sys.argv[1], ROOT):
        sys.exit("\n".join(found))
    notes = section((ROOT / "CHANGELOG.md").read_text(), f"[{sys.argv[1].removeprefix('v')}]")
    sys.stdout.write(linked(notes, sys.argv[1], os.environ.get("REPOSITORY_URL", "")) + "\n")


if __name__ == "__main__":
    main()
