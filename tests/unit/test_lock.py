"""The lock file fits `pyproject.toml`, and every package in it has a hash."""

import re
import tomllib
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging")

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

ROOT = Path(__file__).parents[2]
NOT_IN_IT = {"gpu", "trl", "verl", "data"}
"""Extras of other environments."""
NOT_LOCKED = {"torch", "tlt-rl"}
"""torch's CPU build is on another index."""


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of every package."""
    text = (ROOT / "requirements-cpu.lock").read_text().replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            name, version = pin.split("==")
            found[name] = (version, hashes)
    return found


def test_every_package_has_hashes() -> None:
    packages = locked()
    assert len(packages) > 100
    assert list(packages) == sorted(packages)
    for name, (_, hashes) in packages.items():
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name


def test_the_lock_fits_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        Requirement(text)
        for texts in (
            project["dependencies"],
            *(v for k, v in extras.items() if k not in NOT_IN_IT),
        )
        for text in texts
    ]
    packages = locked()
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        if name not in NOT_LOCKED:
            assert name in packages, f"run .ci/lock.py: {name} is missing"
            version = packages[name][0]
            assert requirement.specifier.contains(version), f"run .ci/lock.py: {name} {version}"
