"""Write the contract: what our plug-in uses of vLLM, with the signatures of vLLM's CUDA wheel.

    python tests/contract/make.py            # downloads the wheel, about 310 MiB, and unpacks it
    python tests/contract/make.py WHEEL      # a wheel that is already here, or a folder with vllm/
    python tests/contract/make.py --check    # compares and writes nothing: `make check-gpu`
    python tests/contract/make.py --unpack FOLDER    # only the wheel's sources, into a folder

The wheel is only read, never installed, so this needs no GPU. Run it after the plug-in uses
something new of vLLM, and read the difference before committing it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract.sources import Sources
from contract.uses import environment, uses

VERSION = "0.32.0"
PLUGIN = Path(__file__).parents[2] / "src" / "tlt" / "vllm"
CONTRACT = Path(__file__).parent / f"vllm-{VERSION}.json"


def read(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return the names that the plug-in uses of the vLLM in a folder, and what does not fit."""
    sources = Sources(root)
    found = uses(PLUGIN, sources)
    return found.names | environment(PLUGIN, sources), found.faults


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


def unpack(wheel: Path | None, folder: Path) -> str:
    """Put the sources of a wheel into a folder, and return the wheel's name."""
    with tempfile.TemporaryDirectory() as place:
        wheel = wheel or _download(Path(place))
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
            archive.extractall(folder, names)
        return wheel.name


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("vllm", nargs="?", type=Path, help="a wheel, or a folder with vllm/")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="only unpack the sources")
    given = parser.parse_args()
    if given.unpack is not None:
        unpack(given.vllm, given.unpack)
        return 0
    if given.vllm is not None and given.vllm.is_dir():
        source = "a folder"
        names, faults = read(given.vllm)
    else:
        with tempfile.TemporaryDirectory() as folder:
            source = unpack(given.vllm, Path(folder))
            names, faults = read(Path(folder))
    if given.check:
        faults = differences(names, json.loads(CONTRACT.read_text())["names"]) + faults
        sys.stdout.write(f"{len(names)} names of vLLM in {source}, {len(faults)} faults\n")
    else:
        contract = {"vllm": VERSION, "source": source, "names": dict(sorted(names.items()))}
        CONTRACT.write_text(json.dumps(contract, indent=1) + "\n")
        sys.stdout.write(f"{len(names)} names in {CONTRACT.name}\n")
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(folder), f"vllm=={VERSION}"], check=True)
    return next(folder.glob("vllm-*.whl"))


if __name__ == "__main__":
    raise SystemExit(main())
