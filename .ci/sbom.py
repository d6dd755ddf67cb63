"""Write the bill of materials of the CPU set-up: CycloneDX JSON, made from the lock file.

    python .ci/sbom.py > sbom-cpu.cdx.json

Needs nothing but Python and no network. The same lock makes the same file, byte for byte. torch is
not in the lock: its version is the Makefile's, and it has no hash here.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = "tlt-rl"


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of every package in a lock file."""
    found = {}
    for line in text.replace("\\\n", "").splitlines():
        if line.strip() and not line.startswith("#"):
            pin, *hashes = line.split()
            name, version = pin.split("==")
            found[name] = version, [each.removeprefix("--hash=sha256:") for each in hashes]
    return found


def torch_version(makefile: str) -> str:
    found = re.search(r"^TORCH \?= torch==(\S+)$", makefile, re.MULTILINE)
    if found is None:
        sys.exit("the Makefile pins no torch: it needs a line such as TORCH ?= torch==2.13.0")
    return found[1]


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    made: dict[str, Any] = {
        **{"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl},
        "scope": "required",
    }
    if hashes:
        # One hash for every wheel that the lock allows: they are of files, not of the package.
        files = [{"alg": "SHA-256", "content": each} for each in hashes]
        url = f"https://pypi.org/project/{name}/{version}/#files"
        made["externalReferences"] = [{"type": "distribution", "url": url, "hashes": files}]
    return made


def bill(lock: str, makefile: str, project: str) -> dict[str, Any]:
    """Return the bill of materials, from the texts of the three files."""
    packages = locked(lock) | {"torch": (torch_version(makefile), [])}
    components = [component(name, *packages[name]) for name in sorted(packages)]
    version = tomllib.loads(project)["project"]["version"]
    ours = component(OURS, version, []) | {"type": "application"}
    del ours["scope"]
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([ours, components], sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": ours},
        "components": components,
        "dependencies": [
            {"ref": ours["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}
        ],
    }


def main() -> None:
    texts = ("requirements-cpu.lock", "Makefile", "pyproject.toml")
    made = bill(*((ROOT / name).read_text() for name in texts))
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
