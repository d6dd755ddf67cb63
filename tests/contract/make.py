"""Write the contract: what our plug-in uses of vLLM, with the signatures of vLLM's CUDA wheel.

    python tests/contract/make.py            # downloads the wheel, about 310 MiB, and unpacks it
    python tests/contract/make.py WHEEL      # a wheel that is already here, or a folder with vllm/

The wheel is only read, never installed, so this needs no GPU. Run it after the plug-in uses
something new of vLLM, and read the difference before committing it.
"""

from __future__ import annotations

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


def main(given: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if given and Path(given[0]).is_dir():
            root, source = Path(given[0]), "a folder"
        else:
            wheel = Path(given[0]) if given else _download(Path(folder))
            root, source = Path(folder), wheel.name
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
        names, faults = read(root)
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    contract = {"vllm": VERSION, "source": source, "names": dict(sorted(names.items()))}
    CONTRACT.write_text(json.dumps(contract, indent=1) + "\n")
    sys.stdout.write(f"{len(names)} names in {CONTRACT.name}\n")
    return 1 if faults else 0


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(folder), f"vllm=={VERSION}"], check=True)
    return next(folder.glob("vllm-*.whl"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
