"""The lock file fits `pyproject.toml`, and every package in it has a hash."""

import re
import tomllib
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging")

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

ROOT = Path(__file__).parents[2]
OTHER_EXTRAS = {"gpu", "trl", "verl"}
NOT_LOCKED = {"torch", "tlt-rl"}


def test_the_lock_fits_what_the_package_asks_for() -> None:
    text = (ROOT / "requirements-cpu.lock").read_text().replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    versions = dict(pin.split("==") for pin, *_ in lines)
    for pin, *hashes in lines:
        assert hashes, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [text for name, of in extras.items() if name not in OTHER_EXTRAS for text in of]
    for requirement in map(Requirement, [*project["dependencies"], *asked]):
        name = canonicalize_name(requirement.name)
        if name not in NOT_LOCKED:
            assert name in versions, f"run `make lock`: {name} is missing"
            assert requirement.specifier.contains(versions[name]), f"run `make lock`: {name}"
