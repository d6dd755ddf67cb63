"""Write the contract: what our plug-in uses of vLLM, with the signatures of its CUDA wheels.

    python tests/contract/make.py            # downloads the wheels, 310 MiB each, and unpacks them
    python tests/contract/make.py WHEEL...   # wheels that are already here
    python tests/contract/make.py --check    # compares and writes nothing: `make check-gpu`
    python tests/contract/make.py --unpack FOLDER WHEEL    # only the wheel's sources, into a folder

The file of `BASE` names everything. Those of other versions name what differs from it (null: not in
that version), and the faults that our code knows and avoids there (`known`).

Wheels are only read, never installed, so this needs no GPU. Run it after the plug-in uses something
new of vLLM, and read the difference before committing it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract.sources import Sources
from contract.uses import environment, uses

VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
BASE = "0.32.0"
"""The version that engines on CPUs install."""
PLUGIN = Path(__file__).parents[2] / "src" / "tlt" / "vllm"


def read(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return the names that the plug-in uses of the vLLM in a folder, and what does not fit."""
    sources = Sources(root)
    found = uses(PLUGIN, sources)
    return found.names | environment(PLUGIN, sources), found.faults


def path_of(version: str) -> Path:
    """Return the file of a version's contract."""
    return Path(__file__).parent / f"vllm-{version}.json"


def committed(version: str) -> tuple[dict[str, str], list[str]]:
    """Return the names of a version's contract, and the faults that our code avoids."""
    own = json.loads(path_of(version).read_text())
    names = own["names"] if version == BASE else committed(BASE)[0] | own["names"]
    return {name: text for name, text in names.items() if text is not None}, own.get("known", [])


def differences(names: dict[str, str], committed: dict[str, str]) -> list[str]:
    """Return in which names and signatures a vLLM differs from the committed contract."""
    found = []
    for name in sorted(names.keys() | committed.keys()):
        has, had = names.get(name), committed.get(name)
        if had is None:
            found.append(f"{name} is not in the contract")
        elif has is None:
            found.append(f"{name} is in the contract, but not in this vLLM, or not in use")
        elif has != had:
            found.append(f"{name} is {has}, in the contract {had}")
    return found


def unpack(wheel: Path, folder: Path) -> None:
    """Put the sources of a wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
        archive.extractall(folder, names)


def write(version: str, source: str, names: dict[str, str], faults: list[str]) -> None:
    """Write the contract of a version; of another version than `BASE`, what differs from it."""
    contract: dict[str, Any] = {"vllm": version, "source": source}
    said: dict[str, str | None] = dict(names)
    if version != BASE:
        base, _ = committed(BASE)
        said = {n: names.get(n) for n in base | names if names.get(n) != base.get(n)}
        contract["known"] = faults
    contract["names"] = dict(sorted(said.items()))
    path_of(version).write_text(json.dumps(contract, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="only unpack the sources")
    given = parser.parse_args()
    is_good = True
    with tempfile.TemporaryDirectory() as place:
        wheels = given.wheels or [download(version, Path(place)) for version in VERSIONS]
        for wheel in sorted(wheels, key=lambda wheel: not wheel.name.startswith(f"vllm-{BASE}-")):
            version = wheel.name.split("-")[1]
            folder = given.unpack or Path(place) / version
            unpack(wheel, folder)
            if given.unpack:
                continue
            names, faults = read(folder)
            if given.check:
                had, known = committed(version)
                faults = differences(names, had) + [fault for fault in faults if fault not in known]
                is_good = is_good and not faults
            else:
                write(version, wheel.name, names, faults)
            sys.stdout.write(f"{len(names)} names of vLLM in {wheel.name}, {len(faults)} faults\n")
            sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    return 0 if is_good else 1


def download(version: str, folder: Path) -> Path:
    """Download the CUDA wheel of a version."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(folder), f"vllm=={version}"], check=True)
    return next(folder.glob(f"vllm-{version}-*.whl"))


if __name__ == "__main__":
    raise SystemExit(main())
